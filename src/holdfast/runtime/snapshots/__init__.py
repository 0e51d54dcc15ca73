"""State in the memory of nodes: copied during the next step, and restored if all live copies are lost.

`Snapshots.on_step_applied` is called after each applied step. If a snapshot is due, `SnapshotTaker` copies this
member's part into its agent's memory. `Snapshots.wait_copied` waits before the next change of the state until it is
copied. After a loss `Snapshots.restore` reads all parts, from this node first and then from other nodes
(`SnapshotRestorer`). `Snapshots.stash` stores the whole state for a change of layout.
"""
