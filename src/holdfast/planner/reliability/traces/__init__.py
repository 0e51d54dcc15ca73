"""Failures and repairs as recorded: what distributions they follow, and what that changes."""
