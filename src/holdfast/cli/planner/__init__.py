"""The commands that plan: spare nodes, a fleet over months, where experts live."""
