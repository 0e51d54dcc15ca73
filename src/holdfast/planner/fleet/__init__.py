"""The cost of failures for a job on thousands of nodes over months, from the durations of a recovery's parts."""
