"""Commands for planning: spare nodes, a fleet over months, the placement of experts."""
