"""Handling of a received state, by one worker or by its whole replica group (docs/layouts.md, rules 6 and 9).

**The local ranks of a replica group replace their kept states together.** If only one group has finished a step, each
of its local ranks sends the step's state to one local rank of every other group. Suppose each replaced its state on
arrival, and the sender failed halfway. Then some local ranks would have the newer step and others the older one, and
the group would have neither.

So a local rank that keeps its own state crosses `begin_adoption` once the newer state is complete. From then on it
sends no report, and it proposes the adoption to its group, as it does a micro-batch. The last proposal releases all of
them in one atomic change. After a Stop it withdraws, if the page still allows that, and reports the state that it kept.
So either all local ranks adopt the newer state, or none does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from holdfast.coordination.worker.comparison import ReplicaComparison
from holdfast.coordination.worker.copy import StateCopy
from holdfast.coordination.worker.generations import KnownGenerations
from holdfast.coordination.worker.replica_group.agreeing import GroupAgreement
from holdfast.coordination.worker.tasks import WorkerInstruction
from holdfast.protocol.plan import PassedStep


class StateAdoption(GroupAgreement):
    """A worker's part in receiving the state that peers send."""

    def __init__(self, worker: str) -> None:
        """Start without a generation, with a fresh state."""
        super().__init__()
        self.generations = KnownGenerations(worker)
        self._copy = StateCopy()
        self._comparison = ReplicaComparison()

    def accept_push(self, generation: int) -> bool:
        """Return whether to accept the state that a peer offers for `generation`. False if frozen, if no state is
        lacking, or for a generation that is not being entered. A worker without a current generation enters the pending
        one.

        If this worker `keeps` its own state, the shell must store the received one next to it; else its state becomes
        void.
        """
        if self.generations.frozen or not self._copy.lacking:
            return False
        pending = self.generations.pending_of(generation)
        if pending is not None and self.generations.plan is None:
            self._enter_pending()
        if not self._is_entering(generation):
            return False
        if not self._copy.keeps:
            self._copy.mark_void()
        return True

    def begin_adoption(self, generation: int) -> bool:
        """Begin to replace the local state with one that has arrived completely; return False if it came too late.

        If the replica group receives together (`Receive.together`), a local rank that `keeps` its own state proposes
        the adoption, and goes on once all have. `cancel_adoption` follows if the proposal is withdrawn. A local rank
        without a state proposes it after `finish_receive`, because its old state is void.
        """
        if not self._is_entering(generation):
            return False
        self._change_phase("begin_adoption")
        return True

    def is_adoption_wanted(self, generation: int) -> bool:
        """Return whether to keep waiting for the other local ranks. Once False, it stays False: withdraw."""
        return not (self.done or self.generations.frozen) and self.generations.number == generation

    def cancel_adoption(self) -> list[WorkerInstruction]:
        """Keep the old state, because not all local ranks of the group have received theirs."""
        self._change_phase("cancel_adoption")
        return self._report_if_due()

    def finish_receive(self, passed: Sequence[PassedStep], step: int) -> list[WorkerInstruction]:
        """Record that the received state of `step` is here, with `passed`, the results of the newest steps up to it.
        This worker's own history and gradients are forgotten.

        Return the report if a Stop waits for it: it passes those results on to the coordinator.
        """
        self._change_phase("finish_receive")
        self._share.summed = []
        self._copy.mark_void()
        self._copy.set_step(step, passed)
        self._copy.sent = tuple(passed)
        self._comparison.record_received_state(step)
        return self._report_if_due()

    def void_received_state(self) -> list[WorkerInstruction]:
        """Mark the state as void, because the received state could not replace it.

        Return the report if a Stop waits for it.
        """
        self._change_phase("void_received_state")
        self._copy.mark_void()
        return self._report_if_due()

    # ---- inside ----

    @abstractmethod
    def _is_entering(self, generation: int) -> bool:
        """Return whether this worker is about to enter this generation."""

    @abstractmethod
    def _enter_pending(self) -> None:
        """Make the pending generation the current one."""

    @abstractmethod
    def _change_phase(self, boundary: str) -> None:
        """Change to the phase to which this boundary leads."""

    @abstractmethod
    def _report_if_due(self) -> list[WorkerInstruction]:
        """Return the report that a Stop requires, if there is a Stop and nothing is in progress."""
