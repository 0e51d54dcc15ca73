"""The arithmetic of one step: gradients of micro-batches in, optimizer step out.

`Workload` holds model, optimizers and data. In a step: `Workload.start_step`, then `Workload.load_micro_batch` and
`Workload.backward` for each micro-batch, then `Workload.reduce`, and after the commit operation `Workload.apply`. Local
sums stay unchanged until then, so that a step can be repeated after a failure.

- `Updates`: chooses the optimizer of each step.
- `RunningStatistics`, `LoggedValues`, `SkippedMicroBatches`: notes of micro-batches, combined in their order on every
  rank.
- `LossScale`: loss scaling for float16. `Fingerprinting`: the settings that workers compare in each step.
- `StepGuard`: refuses optimizer steps that the script makes itself.
"""
