"""A job's events told as what they were part of: recoveries, and why a job stands."""
