"""The coordinator's process: one port, its door, what is served there, and the shell around the machine."""
