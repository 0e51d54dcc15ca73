"""Shared memory in which the workers of a replica group agree on their work (docs/layouts.md)."""
