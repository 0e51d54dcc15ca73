"""Simulated experts: where they are stored, and how they move."""
