"""Chooses degrees by arithmetic: what a plan costs in seconds and bytes. Standard library only, for nodes."""
