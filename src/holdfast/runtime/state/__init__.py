"""The training state, and its transfer to workers that join.

`TrainingState.capture` returns the state as a list of tensors and a `Manifest`, without a copy. A receiver calls
`TrainingState.prepare` to get memory, and `TrainingState.adopt` once it is filled.

- Sender: `StateSender` connects to the receivers and streams the bytes while training goes on.
- Receiver: `StateInbox` listens, `StateReceiver` receives one state. Both sides prove that they know the plan's secret
  before any byte is parsed (`wire.py`).
- `Parcels`: transfers of experts between members during a step.
- `Optimizers`: the job's optimizers by name. `tree.py`: values that are not tensors, as MessagePack, never pickle.
- `StepSettings`: settings that the loop changes before a step, restored if the step is repeated.
"""
