"""Which job has how many nodes: the division by which most weighted achieved FLOP/s come about (Unicron, section 5)."""
