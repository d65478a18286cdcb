"""Key layouts of single files, one a family: names, and the configuration that shapes tell."""
