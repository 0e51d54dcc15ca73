"""The coordinator's state machine, `Coordinator`: handlers of inputs, and the decision after each input.

`Coordinator.handle` looks up the handler for (input, `JobState`) in a table (`table.py`). A pair without a handler is a
bug, and a test checks that there is none. Messages of workers are handled in `handlers.py`. After the handler, the same
checks run in the same order (`Coordinator._advance`): drain nodes, then `Deciding.decide` for an interrupted
generation, then `Deciding.start` for the first one. `Transaction.flush` returns the instructions.

`JobParts` builds the parts that decide together and connects them. `Admission` accepts or refuses nodes, `Finishing`
notices workers that left their loops too early, `injection` checks faults that a user injects.
"""
