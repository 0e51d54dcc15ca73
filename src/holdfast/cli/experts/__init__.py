"""`holdfast place`."""
