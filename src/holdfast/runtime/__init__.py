"""The code of a worker process: training with torch.

A script calls it in this order:

    job = holdfast.init()                       # attach to the agent, or train alone
    job.protect(model, optimizer, dataset, global_batch=32, micro_batch=4)
    for step in job.steps(1000):                # enter a generation, repeat undone steps
        for batch in step.micro_batches():      # `data`: samples and randomness
            step.backward(loss_of(model, batch))  # `gradients`: sums of this worker
        step.apply()                            # `reduction`, the commit operation of `groups`, optimizer step

`session` implements `Job` and `Step` and drives the worker's state machine, `WorkerMachine` of `coordination`. The
machine decides; the training thread executes its tasks. `generation` holds the resources of one generation, `state`
sends the training state to workers that join, `checkpoints` and `snapshots` save it, and `moe` has the MoE layer.
"""
