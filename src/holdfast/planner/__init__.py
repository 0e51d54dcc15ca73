"""Planning before a job runs. No job imports this package.

- `placement`: expert placement for inference engines. `rebalance_experts` takes and returns the arrays of EPLB;
  `repair` replans after a loss.
- `reliability.sparing`: `evaluate` returns the goodput of each sparing strategy of a `SparingCase`, in closed form.
- `reliability.monte_carlo`: `simulate_strategy` returns the same by simulation, with its error.
- `reliability.traces`: `fit_trace` fits distributions to recorded failures.
- `fleet`: `forecast` returns the cost of failures for a job on thousands of nodes over months.

Commands: `holdfast spares` and `holdfast simulate`. Inference engines call `placement` under the name
`holdfast.placement`.
"""
