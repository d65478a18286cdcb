"""Ranks on several machines: the link to another one, and how all meet."""
