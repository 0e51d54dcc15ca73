"""From a failure to the next state of the job.

Every failure enters through `Failures.take`, whichever part detected it. It classifies the failure, emits
`failure_detected`, forgets the lost workers, and ends their generation. `Deciding` in `job` decides how to continue,
once all other members have reported.

- `KeptRanks`: rank hold. The ranks of lost processes wait for their replacements (`--on-process-failure hold`).
- `Raisers`: script errors. A worker whose script raised keeps its state as long as it may be the only copy.
- `Closing`, `Ending`: the end of a job, with a checkpoint if possible.
"""
