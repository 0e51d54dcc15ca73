"""The resources of a worker for one generation: its group, its connections for state, its experts.

`Generations.of` creates the `Resources` of a generation on demand. `Generations.interrupt` breaks off every wait in it
and never blocks; `Resources.leave` retires its groups, from the thread that used them. `Shared` is the state that the
parts of a session have in common, guarded by one condition. `SessionExperts` moves experts when a generation is
entered.
"""
