"""Fault plans, grouped by the behavior they exercise. Each is a function of a seed."""
