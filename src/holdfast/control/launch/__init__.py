"""A whole job on one machine: start, follow and end its processes."""
