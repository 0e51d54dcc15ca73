"""Which steps and checkpoints count, and what recoveries have cost."""
