"""One attempt at one step: what the user's loop is given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from holdfast.coordination.worker.tasks import Compute
from holdfast.errors import StepUseError
from holdfast.protocol.commit import Commit
from holdfast.runtime.faults.dying_group import FaultingCommunicator
from holdfast.runtime.groups import commit as commit_operation
from holdfast.runtime.groups.communicator import Communicator, HaltedError, PeerLostError
from holdfast.runtime.session.session import Session


class Step:
    """One attempt at one step of the job.

    A failure elsewhere never raises here: the micro-batches simply end, `apply` returns False, and `job.steps` yields
    the step again. After an `apply` that returned True, `loss` and `grad_norm` are those of the global batch, and
    `skipped` says whether its gradients were not finite and left the model as it was.
    """

    def __init__(self, session: Session, compute: Compute, generation: int) -> None:
        self.number = compute.step
        self.loss = math.nan
        self.grad_norm = math.nan
        self.skipped = False
        self.applied = False
        self._session = session
        self._compute = compute
        self._generation = generation
        self._open: int | None = None
        self._begun = False
        self._exhausted = False
        self._ended = False
        session.workload.begin(compute.step, compute.held)

    def micro_batches(self) -> Iterator[Any]:
        """Yield this worker's micro-batches of the step, each seeded by (seed, step, micro-batch).

        Raises:
            StepUseError: the loop went on without `backward`, or is the second one.
        """
        if self._begun:
            raise StepUseError(f"step {self.number}: micro_batches() is gone through once, its samples count once")
        self._begun = True
        for micro_batch in self._compute.micro_batches:
            if micro_batch in self._compute.held:
                continue
            self._session.faults.at("compute", self.number)
            if not self._session.cross(self._generation, lambda machine, m=micro_batch: machine.computing(m)):
                return
            # From here on the coordinator may count on this micro-batch: it is finished whatever happens meanwhile.
            self._open = micro_batch
            yield self._session.workload.load(micro_batch)
            if self._open is not None:
                raise StepUseError(f"step {self.number}: each micro-batch needs one step.backward(loss)")
            if self._void():
                return
        self._exhausted = self._serve()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of the micro-batch at hand; `loss` is its mean.

        Raises:
            StepUseError: there is no micro-batch at hand.
        """
        if self._open is None:
            raise StepUseError(f"step {self.number}: backward() belongs inside `for batch in step.micro_batches()`")
        micro_batch, self._open = self._open, None
        self._session.workload.backward(loss, micro_batch)

    def apply(self) -> bool:
        """Reduce, agree, and change the state: on all survivors or on none.

        After a step that was not skipped, the `grad` of each parameter outside the experts is the global batch's,
        clipped, until the next step begins.

        Returns:
            True where the step is applied here, exactly once per step; False where a failure undid the attempt.

        Raises:
            StepUseError: called twice, or before all micro-batches were computed.
            BadInputError: an `extra` was changed since the step before, outside of its apply().
            Exception: whatever `after_apply` raised; the step is applied, and the job ends.
        """
        if self._ended or self._open is not None:
            raise StepUseError(f"step {self.number}: apply() is called once, after all micro-batches had backward()")
        self._ended = True
        self._session.workload.state.watch.check()
        if not self._exhausted and not self._void() and not self._session.halted(self._generation):
            raise StepUseError(
                f"step {self.number}: apply() before the micro-batches were used up; do not break the loop"
            )
        if self._exhausted and self._attempt():
            return self._settled()
        # What becomes of the step is decided elsewhere; FORWARD is carried out on the way to the next task.
        if self._session.settle(self.number):
            return self._settled()
        return False

    def left(self) -> None:
        """The loop wants another step.

        Raises:
            StepUseError: without having called `apply`: it would be given the same step for ever.
        """
        if not self._ended:
            raise StepUseError(f"step {self.number}: the loop goes on without step.apply()")

    def _void(self) -> bool:
        """Return whether an exchange of tokens was broken off: what is computed here is of no use."""
        experts = self._session.workload.experts
        return experts is not None and experts.void is not None

    def _serve(self) -> bool:
        """Take part in the rounds that other ranks have and this one has not; False where one was broken off."""
        experts, share = self._session.workload.experts, self._compute.micro_batches
        if experts is None:
            return True
        rounds = -(-self._session.workload.micro_batches // self._session.world)
        for number in range(len(share), rounds):
            if self._session.halted(self._generation):
                return False
            experts.serve(self.number, number)
            if self._void():
                return False
        return True

    def _settled(self) -> bool:
        passed = self._session.last_applied
        if passed is None or passed.step != self.number:
            return False
        self.passed(passed.commit)
        return True

    def passed(self, commit: Commit) -> None:
        """Say what v says."""
        self.applied = True
        self.loss = mean_loss(commit)
        self.grad_norm = math.sqrt(commit.grad_square)
        self.skipped = commit.nonfinite > 0

    def _attempt(self) -> bool:
        session, generation = self._session, self._generation
        communicator = session.communicator(generation)
        if communicator is None or not session.cross(generation, lambda machine: machine.computed()):
            return False
        try:
            v = self._reduce_and_vote(communicator)
        except PeerLostError as error:
            communicator.retire()
            session.peer_lost(generation, error)
            return False
        except HaltedError:
            communicator.retire()
            return False
        if v is None:
            return False
        expected = session.workload.loader.order.global_batch
        if v.samples != expected:
            raise RuntimeError(f"broken invariant: step {self.number} passed with {v.samples} samples, not {expected}")
        session.faults.at("passed", self.number)
        return session.apply(generation, self.number, v)

    def _reduce_and_vote(self, communicator: Communicator) -> Commit | None:
        """Return v; None where a Stop froze this worker before its vote.

        Raises:
            HaltedError, PeerLostError: left in the middle.
        """
        session, workload = self._session, self._session.workload
        group = communicator
        if session.faults.armed("reducing", self.number):
            group = FaultingCommunicator(communicator, session.faults, self.number, "reducing")
        reduced = workload.reduce(group)
        if not session.cross(self._generation, lambda machine: machine.reduced()):
            return None
        session.faults.at("ready", self.number)
        flags = session.vote(self._generation)
        if flags is None:
            return None
        part = Commit(
            grad_square=reduced.grad_square,
            loss_sum=workload.sums.loss,
            samples=workload.sums.samples,
            nonfinite=reduced.nonfinite,
            flags=flags,
        )
        try:
            pending = commit_operation.start_commit(communicator, part)
            session.faults.at("voted", self.number)
            v = commit_operation.finish(pending)
        except (HaltedError, PeerLostError):
            session.vote_abandoned()
            raise
        session.vote_passed(v)
        return v


def mean_loss(commit: Commit) -> float:
    """Return the global batch's mean loss."""
    return commit.loss_sum / commit.samples if commit.samples else math.nan
