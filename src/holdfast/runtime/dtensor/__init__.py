"""DTensors without their modules: the local part of a tensor that is spread over a replica group.

`local_of` returns the memory of a DTensor on this worker, or the tensor itself if it is a plain one. `placement_of` and
`wrap_by_placement` convert a placement to words and back, for checkpoints and transfers. `ReplicaPosition` is the
position of a worker in its replica group: its shard, and its samples. The modules of DTensor are only imported if they
are in use.
"""
