"""A complete pool under a virtual clock: its machine, jobs, nodes, grants and invariants."""
