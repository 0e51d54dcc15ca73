"""All tests in this folder can import the helpers next to this file."""
