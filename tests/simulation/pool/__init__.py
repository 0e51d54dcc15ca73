"""A whole pool under a virtual clock: its machine, jobs and nodes with their grants, and what must never happen."""
