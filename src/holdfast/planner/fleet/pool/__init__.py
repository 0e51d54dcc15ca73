"""Pools over months: jobs that share nodes, with the recovery of holdfast and of other systems (docs/fleet.md)."""
