"""Shadow steps: they warm up a standby, so that its first real step takes no longer than those of others.

`Rehearsal.next` returns `ShadowAttempt` objects, which the script sees as steps that were undone. They create
gradients, optimizer state, kernels and buffers. `Rehearsal.leave` ends them early if the worker is needed. The state is
void afterwards; `KeptGenerators` restores the random state.
"""
