"""The graph that ComfyUI runs, read from its queue: links, constants, sizes of latents."""
