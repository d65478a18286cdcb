"""ComfyUI's loop around the solver of the backend."""
