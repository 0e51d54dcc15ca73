"""`holdfast spares`."""
