"""The state machine of a node's agent, `AgentMachine`.

The shell (`Agent` in `control`) calls a method for each event and executes the returned instructions, in order:

- `AgentMachine.start`: start the workers of all local ranks.
- `AgentMachine.on_connected`: send `Hello`, with the kept messages for a new coordinator.
- `AgentMachine.on_message`: a message of the coordinator. `AgentMachine.on_worker_message`: a message of a worker.
- `AgentMachine.on_worker_ended`: replace the process, unless `Restarts` decides that the node is broken.

It keeps the applied steps (`KeptSteps`) and each worker's last messages (`LocalRank`), and repeats them to a
coordinator that takes over. `KnownPlans` rebuilds plans from the changes that the coordinator sends.
"""
