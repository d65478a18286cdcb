"""Starts ranks on this machine."""
