"""What nodes are told of a generation, as little as can be: plans as changes, addresses in bundles."""
