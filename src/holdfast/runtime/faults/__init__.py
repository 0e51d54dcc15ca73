"""Fault injection within a worker, for `holdfast inject` and tests.

`Faults.on_inject` executes a fault at once, or keeps it for a phase of a step: the training thread calls
`Faults.strike_at` at each phase. `FaultingCommunicator` fails in the middle of a collective; `flip_bit` changes one bit
of a tensor. Jobs accept faults only with `--allow-faults`, which the coordinator checks.
"""
