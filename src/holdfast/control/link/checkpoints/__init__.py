"""Parts of checkpoints between a worker, its agent and storage."""
