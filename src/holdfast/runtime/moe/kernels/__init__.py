"""Kernels that permute rows of tokens on a device: one interface, implemented with torch and with Triton."""
