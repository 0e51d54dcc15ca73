"""Fakes of parts of a job: hundreds of nodes and workers in one process, and steps that are played without training."""
