"""Places experts on nodes and workers.

- At a failure or a join, `keep_placement` places experts without a search: held replicas stay, missing ones are added.
- During training, a `PlacementSearch` answers a `PlacementQuestion` with `compute_placement`, which uses `make_plan` of
  `planning`. It runs in its own process. `PlacementAnswer` says whether the switch pays.
- `place_static` is the baseline: static expert parallelism.
- `HeldExperts` is one worker's view. `apply_placement` starts a new placement, `on_received` notes that all experts
  have arrived, and `on_committed`, after the first commit, drops replicas that live elsewhere.

On the wire a worker's experts are one blob (`encode_experts`, `decode_experts`).
"""
