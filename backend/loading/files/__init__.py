"""Files as they lie on disk, and what is refused of them before they are read."""
