"""The probability that a placement survives node losses, exact or sampled, and a search guided by it."""
