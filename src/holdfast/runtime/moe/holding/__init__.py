"""The experts that a worker holds: their weights and optimizer state, their moves, their gradients."""
