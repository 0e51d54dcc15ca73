"""What fails: simulated processes around the real machines, and what they keep in memory and on disk."""
