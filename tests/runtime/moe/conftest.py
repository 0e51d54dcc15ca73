"""Make the helper modules of this folder importable from all tests below it."""
