"""Starts ranks on this machine, and says why they ended."""
