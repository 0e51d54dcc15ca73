"""Simulates coordination with a virtual clock and failing machines."""
