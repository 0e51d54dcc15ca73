"""Parts of checkpoints on their way: from a worker to its agent's memory, and from there to where they stay."""
