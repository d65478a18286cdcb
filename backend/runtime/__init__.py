"""The Python process: what it imports, its operators for compiled blocks, its end, files it writes."""
