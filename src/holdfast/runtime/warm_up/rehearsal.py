"""All shadow steps of one worker: how many, the work after each, and the cleanup at the end.

Each optimizer is updated in two shadow steps, of two micro-batches each. The first creates everything that is created
lazily: gradients, optimizer state, kernels, buffers of the reduction, memory blocks of the allocator. The second runs
through it as all real steps will. More shadow steps would not create anything else, except what depends on the number
of workers.
"""

from __future__ import annotations

import logging
import random
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from holdfast.clock import Clock
from holdfast.runtime.generation.resources import SharedContext
from holdfast.runtime.gradients.workload import Workload
from holdfast.runtime.groups.communicator import LocalCommunicator
from holdfast.runtime.tensors import fork_rng
from holdfast.runtime.warm_up.shadow import ShadowAttempt


class SavedGenerators:
    """Saves their states until `restore`, so that shadow steps do not change the script's later draws."""

    def __init__(self) -> None:
        self._kept = ExitStack()

    def save(self) -> None:
        """Save the states of torch's, numpy's and Python's global generators, until `restore`."""
        untyped: Any = np.random
        self._kept.enter_context(fork_rng())
        self._kept.callback(random.setstate, random.getstate())
        self._kept.callback(untyped.set_state, untyped.get_state())

    def restore(self) -> None:
        """Restore the saved states."""
        self._kept.close()


logger = logging.getLogger(__name__)

#: per optimizer
SHADOW_STEPS = 2


class ShadowSteps:
    """Shadow steps, in a world of one. For the training thread. The state is void after the first one starts."""

    def __init__(self, shared: SharedContext, workload: Workload, clock: Clock) -> None:
        """Create an instance; no shadow step is in progress."""
        self._shared = shared
        self._workload = workload
        self._clock = clock
        self._generators = SavedGenerators()
        self._started_at = 0.0
        #: numbers of the remaining steps
        self._remaining: list[int] = []
        self._done = 0
        self._error = ""
        #: keys of the optimizer state of each parameter before the first shadow step
        self._state_before: list[dict[Any, set[Any]]] = []

    @property
    def is_under_way(self) -> bool:
        """Whether shadow steps are in progress. The caller holds the lock."""
        return self._shared.machine.warming.is_running

    def next_step(self) -> ShadowAttempt | None:
        """Return the next shadow step; the first call starts them, and saves the random generators.

        Returns:
            None, without an effect, if no warm-up is due at the first call. None after the last one, or if memory ran
                out in one: then their results are discarded, and the coordinator gets the seconds and the error.
        """
        warming = self._shared.machine.warming
        with self._shared.changed:
            is_first = not self.is_under_way
            if is_first and not warming.start():
                return None
        if is_first:
            self._start()
        if self._remaining and not self._error:
            return ShadowAttempt(self._shared, self._workload, self._remaining[0], self._on_step_done)
        self._discard_results()
        with self._shared.changed:
            seconds = self._clock.monotonic() - self._started_at
            self._shared.execute(warming.finish(seconds, self._error))
            self._shared.changed.notify_all()
        logger.info("%d shadow steps in %.2f s%s", self._done, seconds, f": {self._error}" if self._error else "")
        return None

    def cut_short(self) -> None:
        """End the shadow steps early, because this worker is needed: discard their results, and tell the machine. The
        coordinator gets no report; if the worker stays a standby, they start again from the first.
        """
        self._discard_results()
        with self._shared.changed:
            self._shared.machine.warming.interrupt()
            self._shared.changed.notify_all()

    def _start(self) -> None:
        """Save the random generators, and choose the steps: `SHADOW_STEPS` for each optimizer.

        Optimizers whose first update would come after the last step of the loop are left out. Notes which optimizer
        state exists, so that the rest can be discarded.
        """
        self._started_at, self._done, self._error = self._clock.monotonic(), 0, ""
        self._generators.save()
        updates, last = self._workload.updates, self._workload.loader.last_step
        numbers = {updates.order.index(name) + 1 for name in updates.order}
        self._remaining = [
            step for step in sorted(numbers) if last is None or step <= last for _ in range(SHADOW_STEPS)
        ]
        optimizers = self._workload.state.optimizers
        self._state_before = [{one: set(kept) for one, kept in optimizer.state.items()} for optimizer in optimizers]

    def _on_step_done(self) -> None:
        """Run the reduction and the optimizer step, in a world of one, after the script went through a shadow step.

        If memory runs out, the error is kept for the report, and no more shadow steps follow.
        """
        self._remaining.pop(0)
        self._done += 1
        try:
            self._workload.finish_shadow_step(LocalCommunicator())
        except (MemoryError, torch.OutOfMemoryError) as error:
            # The dense part and this worker's experts may still fit: a real world never places all experts on one
            # worker.
            what = "with all experts in one place" if self._workload.experts is not None else "in a shadow step"
            self._error = f"the optimizer's state does not fit {what}: {error}"

    def _discard_results(self) -> None:
        """Discard gradients and new optimizer state, and restore settings and random generators.

        The memory of the optimizer state is kept for the state that will be received.
        """
        self._workload.state.settings.restore()
        for step in range(1, len(self._workload.updates.order) + 1):
            self._workload.start_step(step, ())
        removed: list[object] = []
        for optimizer, before in zip(self._workload.state.optimizers, self._state_before, strict=True):
            for parameter in list(optimizer.state):
                known = before.get(parameter)
                for key in [key for key in optimizer.state[parameter] if known is None or key not in known]:
                    removed.append(optimizer.state[parameter].pop(key))
                if known is None:
                    del optimizer.state[parameter]
        self._workload.state.recycle_memory(thing for thing in removed if isinstance(thing, torch.Tensor))
        self._remaining = []
        self._generators.restore()
