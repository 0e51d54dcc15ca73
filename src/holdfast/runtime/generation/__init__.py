"""The resources of a worker for one generation: its groups, its state transfers, its experts.

`Generations.of` creates the `Resources` of a generation on demand. `Generations.interrupt` interrupts every wait in it
and never blocks; `Resources.retire` retires its groups, from the thread that used them. The parts of a session share
one `SharedContext`, guarded by one condition. `SessionExperts` moves experts when a generation is entered.
"""
