"""A job's events on the terminal: read from a coordinator or a file, summed up, shown live, followed to the end."""
