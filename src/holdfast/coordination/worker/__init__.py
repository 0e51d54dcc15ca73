"""The state machine of one worker, `WorkerMachine`: its position in a step, its promises, its reports.

The shell (`Session` in `runtime`) passes orders to it and reports boundaries. `WorkerMachine.task` is the next task of
the training thread. These are the calls of a step, with the resulting phase:

    machine.begin_micro_batch(m)     # for each of `machine.share`
    machine.begin_reduction()        # REDUCING
    machine.finish_reduction(v)      # READY
    machine.begin_vote()             # VOTED
    machine.pass_vote(commit)        # PASSED
    machine.begin_apply()            # APPLYING
    machine.finish_apply(...)        # COMPUTE of the next step

`boundaries.py` has the table of allowed transitions. A `Stop` passed to `WorkerMachine.on_order` freezes the machine:
no boundary can be crossed until the next `Begin`, and the report contains the worker's position. `StateCopy` records
the step of the local state. `unit` is the part that the workers of a replica group do together.
"""
