"""The MoE layer of a model: gate, token exchange, expert computation."""
