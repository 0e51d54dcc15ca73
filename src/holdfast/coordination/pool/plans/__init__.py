"""Decides when to divide a pool's nodes again; plans made in advance; the size of the reserve."""
