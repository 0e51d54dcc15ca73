"""Fault plans, the code that applies them, and checks of the consequences."""
