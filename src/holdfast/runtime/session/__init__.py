"""The script's side of a job, and the threads around its worker's state machine.

`init` returns a `Job`; `Job.protect` creates a `Session` and attaches it. Each iteration of `Job.steps`:

1. `Session.next_compute` executes tasks until gradients are due: it enters generations (`Entrance`), receives state
   (`StatePassing`), and waits.
2. `Session.attempt` starts an `Attempt`, which the script sees as a `Step`.
3. `Step.apply` calls `Session.settle`. It commits the attempt (`Attempt.commit`: reduce, agree; then `Applying.apply`
   changes the state), or waits until the coordinator has decided about the step.

Two threads share the `WorkerMachine` under one lock: the listener feeds orders, the training thread crosses boundaries.
Groups are built in further threads (`GroupBuilding`). Without an agent, `SoloLink` answers in place of a coordinator.
"""
