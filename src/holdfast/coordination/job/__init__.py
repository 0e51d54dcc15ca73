"""A job's coordinator as one machine: it hears messages, decides what follows, and answers with instructions."""
