"""Which samples and which randomness a micro-batch has, as pure functions of its number."""
