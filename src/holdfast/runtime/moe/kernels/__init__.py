"""Permuting rows of tokens on a device: one interface, with torch or Triton."""
