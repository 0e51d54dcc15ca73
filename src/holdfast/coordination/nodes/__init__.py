"""The nodes of a job that are not plain members: disconnected, draining, standby, or not yet reachable.

- `DisconnectedNodes`: nodes without a connection that are expected back within their lease.
- `Draining`: draining nodes. They leave at a step boundary, and are retained until the others no longer need their
  state.
- `ExpertHandoff`: experts that only draining nodes hold are copied to other nodes first.
- `StandbyNodes`, `Replacements`: warm standbys, and which of them takes over the rank of a lost or draining node.
- `NewcomerProbes`, `StartProbes`: connections between nodes are tried before a node becomes part of a generation.
- `RecordAge`: detects that the coordinator's record is older than the job, as after a restored backup.
"""
