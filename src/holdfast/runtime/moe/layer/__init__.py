"""The layer that users put into their models: gate, token exchange, expert computation."""
