"""Goodput by number and kind of spares, in closed form."""
