"""Reads transformers from single files in ComfyUI's key layouts and from diffusers folders."""
