"""Commands that plan: spare nodes, fleets over months, expert placement."""
