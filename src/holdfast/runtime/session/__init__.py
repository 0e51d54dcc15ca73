"""The script's side of a job, and the threads around its worker's state machine.

`init` returns a `Job`; `Job.protect` creates a `Session` and attaches it. Each iteration of `Job.steps`:

1. `Session.next_compute` executes tasks until gradients are due: it enters generations (`GenerationEntry`), receives
   state (`StateExchange`), and waits.
2. `Session.start_attempt` starts an `Attempt`, which the script sees as a `Step`.
3. `Step.apply` calls `Session.conclude_attempt`. It commits the attempt (`Attempt.commit`: reduce, agree; then
   `StepApplier.apply_step` changes the state), or waits until the coordinator has decided about the step.

Two threads share the `WorkerMachine` under one lock: the listener feeds orders, the training thread crosses boundaries.
Groups are built in further threads (`BackgroundBuilds`). Without an agent, `SoloLink` answers in place of a
coordinator.
"""
