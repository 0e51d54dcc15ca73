"""When to divide a pool's nodes again, plans made in advance, and the reserve."""
