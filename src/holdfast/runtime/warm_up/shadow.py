"""A shadow step: to the script it looks like a step that a failure undid; it never counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from holdfast.protocol.layouts.proposals import Proposal, ProposalKind
from holdfast.protocol.messages.progress import Activity
from holdfast.runtime.generation.resources import SharedContext
from holdfast.runtime.gradients.workload import Workload

#: The first micro-batch creates gradients and other lazy objects; the second adds to gradients, like all later ones.
MICRO_BATCHES = 2


class ShadowAttempt:
    """One shadow step, instead of an `Attempt`. For the training thread."""

    def __init__(self, shared: SharedContext, workload: Workload, step: int, on_done: Callable[[], None]) -> None:
        """Start the shadow step: without sums, with up to two micro-batches, and with its data prefetched.

        Args:
            step: number of the step that gives samples and optimizer.
            on_done: called when the script has gone through it.
        """
        self.step = step
        self.complete = False
        self._shared = shared
        self._workload = workload
        self._on_done = on_done
        self._micro_batches = range(min(MICRO_BATCHES, workload.micro_batches))
        workload.start_step(step, ())
        self.update = workload.update.name
        workload.loader.expect(iter([(step, number) for number in range(workload.micro_batches)]))
        shared.progress.start_activity(Activity.WARMING)

    @property
    def undone(self) -> bool:
        """Whether it was cut short, because this worker is needed or no warm-up is due any longer."""
        with self._shared.changed:
            return not self._shared.machine.warming.is_due

    def micro_batches(self) -> Iterator[int]:
        """Yield its micro-batches, each once all ranks of the replica group are ready for it.

        Ends early, with `complete` False, when the shadow step is cut short.
        """
        for micro_batch in self._micro_batches:
            # The ranks of a replica group compute them in step: all agree on each micro-batch before it starts.
            proposal = Proposal(0, self.step, micro_batch, ProposalKind.SHADOW)
            if self.undone or not self._shared.agree(proposal, lambda: not self.undone):
                return
            self._shared.progress.start_activity(Activity.WARMING)
            yield micro_batch
            self._workload.keep_note(micro_batch)
        self.complete = True

    def load(self, micro_batch: int) -> Any:
        """Fetch a micro-batch, and seed its random generators."""
        return self._workload.load_micro_batch(micro_batch)

    def backward(self, loss: torch.Tensor, micro_batch: int) -> None:
        """Add a micro-batch's gradients."""
        self._workload.backward(loss, micro_batch)

    def skip(self, reason: str, micro_batch: int) -> None:
        """Leave a micro-batch out."""
        self._workload.skip(reason, micro_batch)

    def skip_reason(self, micro_batch: int) -> str:
        """Return "": a shadow step has no earlier attempts."""
        return ""

    def log(self, values: Mapping[str, float | torch.Tensor], reduce: str) -> None:
        """Log nothing."""

    def check_extra(self) -> None:
        """Check that no `extra` was changed, as in a real step.

        Raises:
            BadInputError: one was changed.
        """
        self._workload.state.watch.check_unchanged()

    def conclude(self) -> None:
        """End the shadow step where the script applies it: reduce and step as warm-up, unless it was cut short.

        Returns None, as for a step that a failure undid.
        """
        if not self.undone:
            self._on_done()
