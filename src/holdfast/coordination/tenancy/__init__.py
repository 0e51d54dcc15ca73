"""The pool client of a job: the job's own side of the pool that it runs in.

`Tenant.hear` handles the pool's message about the job's grants. `Tenant.look` runs after every
input: it drains nodes that the pool recalls, and returns nodes that are lost. It never waits for the pool.
`Pacing` reports how fast the job trains and what failures cost it; `FlopBook` counts the FLOP of a sample.
Outside of pools a `Tenant` has no grants and does nothing.
"""
