"""How a family's transformer is called: the code that models/<family>.py names."""
