"""The state machine of a pool, `Pool`: which job owns which node, by numbered grants (docs/pool.md).

`Pool.start` opens a term; `Pool.handle` takes one input and returns instructions. After each input `Allocator.allocate`
asks the policy (`share`) how many nodes each job gets, and emits grants and recalls. A grant ends only when the job
has returned the node, or the node itself reports that none of its processes run.

- `share`: the policies. `plans`: when to divide nodes again, and plans made in advance. `places`: racks and zones.
- `Fence`: a node's side of its grants. It starts a grant once no process of the previous grant is left.
- `what_if`: the answer to `holdfast whatif`, computed without a change of the pool.
"""
