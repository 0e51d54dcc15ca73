"""Durations in this job, and the limits derived from them.

- `Times`: usual durations by activity and world size, and the limit beyond which one counts as late.
- `LearntLease`: the lease of a node, learned from the gaps between its messages.
- `Reading`, `ProgressAccount`: a worker's progress as its agent reads it.

All of them take the time as an argument; none reads a clock.
"""
