"""Shadow steps: they warm up a standby, so that its first real step is as fast as the steps of other workers.

`ShadowSteps.next_step` returns `ShadowAttempt` objects, which the script sees as steps that were undone. They create
gradients, optimizer state, kernels and buffers. `ShadowSteps.cut_short` ends them early if the worker is needed. The
state is void afterwards; `SavedGenerators` restores the random state.
"""
