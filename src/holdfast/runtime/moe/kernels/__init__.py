"""Moving rows of tokens on one device: one interface, by torch or by Triton."""
