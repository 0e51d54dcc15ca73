"""Evaluations between steps, divided among all ranks.

`Job.evaluate` adds a `ModelEvaluation`. When one is due, `Evaluator.run_due` divides its shards among the ranks,
computes this rank's shards, and gathers all results. `ModelEvaluation.combine` adds them in the order of the shards, so
the means do not depend on the number of workers. The training state does not change. After a failure, finished shards
are kept.
"""
