"""Which rank computes which tokens."""
