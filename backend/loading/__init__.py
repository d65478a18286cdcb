"""Reading transformers: single files in ComfyUI's key layouts and diffusers folders; a rank reads only what
it keeps."""
