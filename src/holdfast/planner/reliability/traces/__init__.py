"""Distributions fitted to recorded failures and repairs, and how they change the recommended spares."""
