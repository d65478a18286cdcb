"""A request's validation, guidance and solver steps."""
