"""Commands for a terminal, without ComfyUI: python -m backend.cli COMMAND."""
