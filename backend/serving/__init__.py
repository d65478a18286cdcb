"""Rank 0's socket, and the broadcast of what it receives to the other ranks."""
