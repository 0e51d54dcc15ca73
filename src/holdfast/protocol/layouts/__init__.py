"""How a replica of the model is spread over a node, and what the places of a unit tell each other and their agent."""
