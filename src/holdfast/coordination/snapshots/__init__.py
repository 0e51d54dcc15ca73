"""Snapshots in the memory of nodes: the parts that each node holds, and which snapshots are complete.

Agents report the parts that they hold: `SnapshotBook.on_parts_held`. `SnapshotBook.update` orders nodes to fetch
copies, so that each part lies on F nodes, in groups chosen by `peers_of`, and emits `snapshot_saved`. After a loss of
all live copies, `SnapshotBook.find_newest` returns the newest complete snapshot. Nothing is stored: agents report again
to a new coordinator.
"""
