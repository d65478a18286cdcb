"""Rank 0's socket, and how the other ranks hear of what it receives."""
