"""Ledger of a job's time, computed from its events."""
