"""From one generation to the next.

After a failure:

1. `Interruption.start` orders all members to stop; `Interruption.add_report` collects their reports.
2. `decide` (`decisions.py`) returns a `Verdict` from the reports: FORWARD, REDO or ROLLBACK; or `NothingLeft`.
3. `plan_generation` (`planner.py`) returns the next `GenerationPlan`: members, ranks, senders of state, experts,
   shares.
4. `PlanDistribution.send_begin` sends it to each node, as a delta to the plan that the node already has
   (`change_of`).

While a job trains, `PendingGeneration` changes the generation at a step boundary instead: `prepare`, `arm`, then
`promote` once a commit has every swap flag raised. `Rebalancing` asks for better placements, `assignment.py` divides
micro-batches among ranks, and `choose_witnesses` selects the workers that report each step.
"""
