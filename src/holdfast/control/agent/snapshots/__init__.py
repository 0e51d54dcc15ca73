"""The parts of snapshots that a node holds: its own, and copies of other nodes'; given out to whoever may read them."""
