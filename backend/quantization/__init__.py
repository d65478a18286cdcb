"""Weights that stay as their files store them, and the linear layers that multiply by them."""
