"""Starts backends and talks to them; needs no ComfyUI."""
