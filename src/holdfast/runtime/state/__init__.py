"""The training state, and its transfer to workers that join.

`TrainingState.capture` returns the state as a list of tensors and a `Manifest`, without a copy. A receiver calls
`TrainingState.prepare` for memory, and `TrainingState.adopt` once it is filled.

- Sender: `Push` connects to the receivers and streams the bytes while training goes on.
- Receiver: `StateInbox` listens, `Receipt` is one state on its way. Both sides prove that they know the plan's secret
  before any byte is parsed (`wire.py`).
- `Parcels`: experts that travel between members next to a step.
- `Optimizers`: the job's optimizers by name. `tree.py`: values that are not tensors, as MessagePack, never pickle.
- `StepSettings`: settings that the loop changes before a step, restored if the step is repeated.
"""
