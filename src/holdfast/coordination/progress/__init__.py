"""Which steps and checkpoints count, and what recoveries cost.

`StepLedger.note` takes each worker's report of an applied step. A step is committed once all live members have applied
it: `Progress.release` then emits `step_committed` for it. Besides that:

- `CheckpointBook.accept`: a checkpoint counts once all its parts are written and its step is committed.
- `saving_period_s`: the period of checkpoints that wastes least time, if the user gives none.
- `RecoveryCost`, `MeasuredCosts`: durations of recoveries, for the event `recovered` and for predictions.
- `choose`: whether a standby takes over at once, or the others continue and it joins later.
- `LoadBook`, `EvaluationBook`: expert loads and results of evaluations.
"""
