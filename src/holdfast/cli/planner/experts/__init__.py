"""`holdfast experts plan`."""
