"""Who is there: letting nodes in, waiting for those that are away, injecting faults into them."""
