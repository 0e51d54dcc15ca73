"""The simulated processes that fail: shells around the real machines, with their memory and disk."""
