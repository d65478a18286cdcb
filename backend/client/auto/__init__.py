"""What auto asks before ranks start, and remembers: measurements, plans, the model's shape."""
