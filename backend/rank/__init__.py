"""One rank: what it does with a message, what rank 0 does besides, and what is admitted."""
