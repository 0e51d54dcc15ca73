"""Explanations of events, from recoveries to why a job waits, and the audit of samples."""
