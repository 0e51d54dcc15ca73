"""Which nodes a job of a pool has: those that it is given and gives back, and how jobs are moved together."""
