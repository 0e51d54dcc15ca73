"""Explanations of events and job states, and the audit of samples."""
