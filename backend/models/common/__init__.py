"""Code and tables that several families use, and modules of one family that are too long for its file."""
