"""From a failure to the next state of the job.

Every failure enters through `Failures.handle`, from all detectors. It classifies the failure, emits `failure_detected`,
removes the lost workers, and interrupts their generation. `GenerationDecider` in `job` decides how to continue, once
all other members have reported.

- `RankHold`: the ranks of lost processes wait for their replacements (`--on-process-failure hold`).
- `ScriptErrors`: a worker with a script error keeps its state as long as it may be the only copy.
- `Closing`, `JobEnd`: the end of a job, with a checkpoint if possible.
"""
