"""The pool client of a job: the job's own side of the pool that it runs in.

`JobPoolClient.on_shares` handles the pool's message about the job's grants. `JobPoolClient.update` runs after every
input: it drains nodes that the pool recalls, and returns nodes that are lost. It never waits for the pool.
`PaceReporter` reports how fast the job trains and what failures cost it; `FlopBook` counts the FLOP of a sample.
Outside of pools a `JobPoolClient` has no grants and does nothing.
"""
