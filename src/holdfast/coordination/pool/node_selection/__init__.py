"""Selects the nodes of each job, and moves jobs into fewer racks and zones."""
