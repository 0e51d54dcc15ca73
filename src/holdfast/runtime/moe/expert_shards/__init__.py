"""The experts on a worker: their weights and optimizer state, migrations, gradients, and checkpoints."""
