"""The same by simulation, and the two beside each other."""
