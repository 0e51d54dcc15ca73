"""How long things take in this job, and the limits derived from it.

- `Times`: usual durations by activity and world size, and the limit beyond which one counts as late.
- `LearntLease`: the lease of a node, learned from the gaps between its messages.
- `Reading`, `ProgressAccount`: what an agent reads of a worker's progress.

All of them take the time as an argument; none reads a clock.
"""
