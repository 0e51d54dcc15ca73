"""Addresses of a generation, in bundles; and what nodes held around a change of the members."""
