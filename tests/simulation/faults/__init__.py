"""What goes wrong, and how it is brought about."""
