"""Fault injection within a worker."""
