"""Dividing a pool's nodes among jobs by weighted achieved FLOP/s (Unicron, section 5)."""
