"""A job's events in the terminal: read from a coordinator or a file, summarized, and shown live."""
