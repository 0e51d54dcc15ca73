"""Where the coordinator keeps its small state: one interface, several stores."""
