"""The nodes of a job that are not plain members: disconnected, draining, standby, or not yet reachable.

- `Absences`: nodes without a connection that are expected back within their lease.
- `Departures`: draining nodes. They leave at a step boundary, and are retained until the others no longer need their
  state.
- `HandingOn`: experts that only draining nodes hold are copied to other nodes first.
- `Standbys`, `Replacing`: warm standbys, and which of them takes over the rank of a lost or draining node.
- `Probing`, `StartProbes`: connections between nodes are tried before a node becomes part of a generation.
- `RecordAge`: detects that the coordinator's record is older than the job, as after a restored backup.
"""
