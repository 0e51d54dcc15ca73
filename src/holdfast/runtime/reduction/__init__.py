"""Gradients of all ranks become one: flat buckets on their way through a group; norms that are equal in every bit."""
