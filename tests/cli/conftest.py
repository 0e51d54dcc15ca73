"""The helpers beside this file can be imported by all tests below it."""
