"""Processes without torch: coordinator, agent, pool server and launcher, with their sockets, clocks and stores.

Coordinator, agent and pool server are shells around a state machine of `coordination`. The servers share `MachineShell`
(`serving`): it feeds one input at a time, writes the record to the store first, then executes the other instructions in
order.

`holdfast run` calls `launch` (`launch`), which starts a coordinator, a zygote and one agent for each node, follows the
job's events, and ends all processes. On a cluster these parts are started one by one:

- `run_coordinator` (`coordinator`): opens the port and the store, and serves until the job is over.
- `run_agent` (`agent`): connects to the coordinator, starts the node's workers, and passes messages on.
- `link`: the worker's end of the Unix socket to its agent. It is the only part of `control` that `runtime` imports.

Commands reach a running coordinator through `CoordinatorClient` (`client.py`).
"""
