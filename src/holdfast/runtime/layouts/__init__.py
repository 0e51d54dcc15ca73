"""One model on several workers of a node: process groups and a device mesh for torch (docs/layouts.md).

FSDP2 and DTensor keep the process groups that they were created with, but communicators change with each generation. So
`ReplicaMesh` gives torch an `OuterGroup` for each dimension. `OuterGroup.swap` puts it on a new communicator, and its
collectives run as rounds on that (`rounds.py`). torch's default group is a `DefaultGroup`, which refuses collectives.
`materialize` fills a model that was created on the meta device; `check_spread` refuses a model that is not sharded over
the mesh.
"""
