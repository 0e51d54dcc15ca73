"""Data that the coordinator collects from all members and distributes again.

- `KeyBundles`: rendezvous keys of a group under construction. Each node sends one bundle, and receives one bundle with
  the keys of all members once it is complete.
- `Memories`: asks nodes for their memory use around a change of members, and emits one event. No decision depends on
  it.
"""
