"""The local part of a tensor that is spread over a replica group.

`local_of` returns the memory of a DTensor on this worker, or the tensor itself if it is not spread. `spread_of` and
`spread_in_words` describe a placement in words and back, for checkpoints and transfers. `PlaceInUnit` is the position
of a worker in its replica group: which shard it holds, and which samples it computes. Modules of DTensor are only
imported if they are in use.
"""
