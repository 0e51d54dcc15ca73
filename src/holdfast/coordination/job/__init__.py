"""The coordinator's state machine, `Coordinator`: handlers of inputs, and the decision after each input.

`Coordinator.handle` looks up the handler for (input, `JobPhase`) in `handler_tables.py`. A test checks that every
pair has a handler. Messages of workers are handled in `handlers.py`. After the handler, the same checks run in the same
order (`Coordinator._do_due_work`): drain nodes, then `GenerationDecider.decide` for an interrupted generation, then
`GenerationDecider.start` for the first one. `Transaction.flush` returns the instructions.

`JobContext` builds the components that decide together and connects them. `Admission` accepts or refuses nodes,
`LoopExits` notices workers that left their loops too early, `injection` checks faults that a user injects.
"""
