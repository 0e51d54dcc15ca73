"""A whole job on one machine: starts its processes, follows them, and leaves nothing behind."""
