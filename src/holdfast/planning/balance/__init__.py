"""How evenly a placement distributes work, steps that improve it, and a port of EPLB."""
