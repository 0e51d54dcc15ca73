"""Failures, spares, goodput and checkpoints in closed form and by simulation: pure functions."""
