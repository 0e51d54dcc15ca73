"""A snapshot part as a file that a worker shares with its agent, and reading it from another node."""
