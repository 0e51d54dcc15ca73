"""Which workers of a node form a replica group, and which layouts are refused (docs/layouts.md)."""
