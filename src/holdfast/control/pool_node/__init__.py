"""A node of a pool: its agent, and the processes of its current grant."""
