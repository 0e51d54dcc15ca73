"""Make the helper modules of this folder importable in all tests below it."""
