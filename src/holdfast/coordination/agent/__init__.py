"""The state machine of a node's agent, `AgentMachine`.

The shell (`Agent` in `control`) calls a method for each event and executes the returned instructions, in order:

- `AgentMachine.start`: start the workers of all local ranks.
- `AgentMachine.connected`: send `Hello`, with the kept messages for a new coordinator.
- `AgentMachine.hear`: a message of the coordinator. `AgentMachine.worker_said`: a message of a worker.
- `AgentMachine.worker_ended`: replace the process, unless `Restarts` says that the node is broken.

It keeps the applied steps (`KeptSteps`) and each worker's last messages (`WorkerPlace`), and repeats them to a
coordinator that takes over. `KnownPlans` rebuilds plans from the changes that the coordinator sends.
"""
