"""All tests below this folder can import its helpers."""
