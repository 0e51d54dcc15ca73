"""Where experts live, and which worker holds which.

- At a failure or a join, `keep` places experts without a search: held replicas stay, missing ones are added.
- While training goes on, a `Search` answers a `PlacementQuestion` with `place`, which uses `make_plan` of `planning`.
  It runs in a process of its own, and `Found` says whether the switch pays.
- `place_static` is the baseline: static expert parallelism.
- `HeldExperts` is one worker's view: `HeldExperts.take_up` a placement, `HeldExperts.brought` all experts, and after
  the first commit `HeldExperts.passed`, when replicas that live elsewhere may be dropped.

On the wire a worker's experts are one blob (`encode`, `decode`).
"""
