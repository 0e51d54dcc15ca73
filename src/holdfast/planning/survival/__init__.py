"""How likely a placement survives the loss of nodes, and search guided by that."""
