"""Places experts on nodes and workers.

- At a failure or a join, `keep` places experts without a search: held replicas stay, missing ones are added.
- During training, a `Search` answers a `PlacementQuestion` with `place`, which uses `make_plan` of
  `planning`. It runs in its own process. `Found` says whether the switch pays.
- `place_static` is the baseline: static expert parallelism.
- `HeldExperts` is one worker's view. `take_up` starts a new placement, `brought` notes that all experts
  have arrived, and `passed`, after the first commit, drops replicas that live elsewhere.

On the wire a worker's experts are one blob (`encode`, `decode`).
"""
