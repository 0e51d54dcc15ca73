"""Thousands of nodes over months: what failures cost a job, from the durations of a recovery's parts."""
