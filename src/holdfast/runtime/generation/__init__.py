"""What a worker has for one generation: its group, its connections for state, and the experts that it holds."""
