"""One worker's machine: where it stands in a step, what it may do next, what it promises and tells."""
