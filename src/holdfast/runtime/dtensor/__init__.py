"""Tensors that are spread over the workers of one replica: what a worker holds of them, and which part that is."""
