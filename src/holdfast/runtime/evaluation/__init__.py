"""Evaluations between steps: shards of data that ranks share out, and what all their results come to."""
