"""Committed steps and checkpoints, and the costs of recoveries.

`StepLedger.add_report` receives each worker's report of an applied step. A step is committed once all live members have
applied it: `Progress.announce_applied_steps` then emits `step_committed`. The other parts are:

- `CheckpointBook.update`: a checkpoint counts once all its parts are written and its step is committed.
- `saving_period_s`: the period of checkpoints that wastes the least time, if the user gives none.
- `RecoveryCost`, `MeasuredCosts`: durations of recoveries, for the event `recovered` and for predictions.
- `choose_replacement`: whether a standby takes over at once, or the others continue and it joins later.
- `LoadBook`, `EvaluationBook`: expert loads and results of evaluations.
"""
