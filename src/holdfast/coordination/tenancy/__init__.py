"""A job's own side of the pool that it runs in: which grants it holds by its record, and what it makes of them."""
