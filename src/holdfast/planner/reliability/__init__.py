"""Distributions of failures and repairs. Its subpackages compute goodput from them: pure functions."""
