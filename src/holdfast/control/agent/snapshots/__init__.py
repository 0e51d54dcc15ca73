"""Snapshot parts in a node's memory, its own and copies for other nodes: keep, serve, fetch."""
