"""The state machine of one worker, `WorkerMachine`: its position in a step, its promises, its reports.

The shell (`Session` in `runtime`) feeds orders and reports boundaries; `WorkerMachine.task` is the next task of the
training thread. In a step the calls are, with the resulting phase:

    machine.computing(micro_batch)   # for each of `machine.share`
    machine.computed()               # REDUCING
    machine.reduced(v)               # READY
    machine.voting()                 # VOTED
    machine.vote_passed(commit)      # PASSED
    machine.begin_apply()            # APPLYING
    machine.applied_step(...)        # COMPUTE of the next step

`boundaries.py` has the table of allowed transitions. A `Stop` passed to `WorkerMachine.order` freezes the machine: no
boundary can be crossed until the next `Begin`, and the report says where the worker stands. `StateCopy` records the
step of the local state; `unit` is the part that the workers of a replica group do together.
"""
