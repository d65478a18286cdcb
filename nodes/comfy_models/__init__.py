"""ComfyUI's model objects, without weights."""
