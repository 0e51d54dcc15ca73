"""The sum of all ranks' gradients, out of place and equal in every bit on every rank.

`reduce_gradients` reduces one or more `Reducible`, such as `GradientBuckets`, together with the result of the step:

1. Gradients are copied into flat buckets (`Bucket`), each cut into one shard for each rank.
2. An all-to-all brings every version of a shard to its owner, which adds them in rank order.
3. The squared norm is added up exactly (`squares.py`), so that it does not depend on how gradients are cut.
4. The owner scales and clips its shard, and an all-gather spreads the result.

Local gradients stay intact, so that a step can be repeated; reduced ones can be applied later.
"""
