"""Goodput of sparing strategies by simulation, and its comparison with the closed form."""
