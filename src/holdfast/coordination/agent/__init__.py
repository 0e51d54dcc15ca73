"""A node's agent as a machine: whom it obeys, what it keeps and says again, which workers it replaces."""
