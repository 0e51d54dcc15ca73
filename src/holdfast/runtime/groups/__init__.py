"""Process groups with collectives that can be left when a generation ends.

1. Each member posts its addresses to a `Board`; agents and coordinator distribute them.
2. `build_communicator` builds the group on gloo, on NCCL or through host memory, flat or by levels.
3. The training thread starts an operation, such as `Communicator.start_all_to_all`, and calls `Communicator.wait`. It
   returns when the operation completed, and raises `HaltedError` or `PeerLostError` otherwise.
4. `start_commit` and `finish_commit` are the commit operation of a step.
5. `Communicator.retire` gives the group up. The `GroupReaper` keeps the group and the buffers of operations under way,
   and destroys them when those have ended.

After an error, the buffers of an operation must not be used again: torch may still write to them.
"""
