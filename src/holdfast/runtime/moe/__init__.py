"""Mixture-of-Experts layers: each expert has any number of copies on any ranks, and copies can move.

A script uses `MoE` (`layer`), or `ElasticExperts` in a model with its own router. Without a job all experts are local.
In a job:

1. `bind_layers` (`holding`) binds all layers of a model to a group and a placement.
2. In forward, the gate (`gates`) chooses experts, all ranks gather their counts, and `dispatch_schedule` of `planning`
   decides which rank computes which tokens. `kernels` orders the rows, `to_experts` and `from_experts` (`layer`)
   exchange them.
3. `experts` computes the rows of a rank.
4. `JobExperts` (`holding`) reduces expert gradients, moves experts between generations, and reports loads.
"""
