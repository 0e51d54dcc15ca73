"""Snapshots in the memory of nodes: who holds which parts, who is to hold copies of them, and which of them serve."""
