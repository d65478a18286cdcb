"""Parallel methods over any transformer: none of these files names a model family."""
