"""Simulated replica groups: several worker processes of a node that hold one replica (docs/layouts.md).

The workers agree on each micro-batch through a shared page and compute it together. They also adopt received state
together and die together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from holdfast.protocol.layouts.proposals import Proposal
from tests.simulation.machines.host import WorkerHost
from tests.simulation.machines.training import SimGradient, gradient


class Page(Protocol):
    """The shared page of a replica group."""

    def propose(self, worker: str, proposal: Proposal, agreed: Callable[[], object]) -> None: ...

    def withdraw(self, worker: str) -> bool: ...

    def finish(self, worker: str, proposal: Proposal, through: Callable[[], object]) -> None: ...


class SimUnit:
    """The memory that the workers of one replica group share while they live."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._proposed: dict[str, tuple[Proposal, Callable[[], object]]] = {}
        self._through: dict[str, tuple[Proposal, Callable[[], object]]] = {}

    def propose(self, worker: str, proposal: Proposal, agreed: Callable[[], object]) -> None:
        """Record a worker's proposal; the last equal proposal completes the agreement."""
        self._proposed[worker] = proposal, agreed
        self._all(self._proposed)

    def withdraw(self, worker: str) -> bool:
        """Withdraw a worker's proposal; return False if all workers have already agreed."""
        return self._proposed.pop(worker, None) is not None

    def finish(self, worker: str, proposal: Proposal, through: Callable[[], object]) -> None:
        """Record that a worker has finished its part of a micro-batch; call all workers when all have finished."""
        self._through[worker] = proposal, through
        self._all(self._through)

    def _all(self, proposals: dict[str, tuple[Proposal, Callable[[], object]]]) -> None:
        if len(proposals) == self._places and len({proposal for proposal, _ in proposals.values()}) == 1:
            calls = [call for _, call in proposals.values()]
            proposals.clear()
            for call in calls:
                call()


class Consent:
    """One worker's proposals to its replica group: it waits until all agree, or withdraws its proposal."""

    def __init__(self, worker: WorkerHost, page: Page) -> None:
        self.page, self._worker = page, worker
        self._asked: _Asked | None = None
        self._lies = False

    def ask(
        self,
        proposal: Proposal,
        *,
        wanted: Callable[[], bool],
        agreed: Callable[[], object],
        withdrawn: Callable[[], object],
    ) -> None:
        """Put a proposal on the page after a delay.

        Args:
            proposal: The proposal to make.
            wanted: Returns whether the proposal is still wanted; called when it is on the page and after each order.
            agreed: Called when all workers have made the same proposal.
            withdrawn: Called when the proposal is withdrawn before that.
        """
        worker = self._worker
        self._asked, self._lies = _Asked(proposal, wanted, agreed, withdrawn), False
        worker.busy = "propose"
        worker.world.after("pause", worker, self._bring, self._asked)
        worker.boundary("proposing")

    def withdraw_if_unwanted(self) -> None:
        """Withdraw the proposal after a delay, if an order has made it unwanted."""
        asked = self._asked
        if asked is not None and not asked.wanted():
            self._worker.world.after("pause", self._worker, self._withdraw, asked)

    def _bring(self, asked: _Asked) -> None:
        worker = self._worker
        if not worker.hung and self._asked is asked and not self._lies:
            self._lies = True
            self.page.propose(worker.id, asked.proposal, lambda: worker.world.after("pause", worker, self._go, asked))
            self.withdraw_if_unwanted()  # An order may have made it unwanted before it reached the page.

    def _withdraw(self, asked: _Asked) -> None:
        if self._worker.hung or self._asked is not asked or asked.wanted():
            return
        if self._lies and not self.page.withdraw(self._worker.id):
            return  # All have agreed; the callback follows.
        self._asked, self._worker.busy = None, ""
        asked.withdrawn()
        self._worker.advance()

    def _go(self, asked: _Asked) -> None:
        if not self._worker.hung:
            self._asked, self._worker.busy = None, ""
            asked.agreed()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A worker's proposal with the arguments of `Consent.ask`."""

    proposal: Proposal
    wanted: Callable[[], bool]
    agreed: Callable[[], object]
    withdrawn: Callable[[], object]


class Work:
    """Computes a worker's micro-batches, alone or in agreement with its replica group."""

    def __init__(self, worker: WorkerHost, consent: Consent | None, done: Callable[[int, SimGradient], object]) -> None:
        """Create an idle object.

        Args:
            worker: The worker that computes.
            consent: The agreement with the replica group, or None for a single worker.
            done: Called for each micro-batch that all workers have computed.
        """
        self._worker, self._consent, self._done = worker, consent, done
        #: The last proposal on which the replica group agreed.
        self._agreed_on: Proposal | None = None

    def begin(self, micro_batch: int) -> None:
        """Compute a micro-batch, or propose it to the replica group first."""
        machine = self._worker.machine
        if self._consent is None or machine.proposal is None:
            self._compute(micro_batch)
            return
        self._consent.ask(
            machine.proposal,
            wanted=lambda: machine.is_proposal_wanted(micro_batch),
            agreed=partial(self._agreed, machine.proposal),
            withdrawn=lambda: machine.withdraw_proposal(micro_batch),
        )

    def withdraw_if_unwanted(self) -> None:
        """Withdraw a proposal that an order has made unwanted."""
        if self._consent is not None:
            self._consent.withdraw_if_unwanted()

    def _compute(self, micro_batch: int) -> None:
        worker, world, step = self._worker, self._worker.world, self._worker.machine.step
        worker.busy, worker.page.micro_batch = "compute", micro_batch
        made = SimGradient(gradient(worker.state, step, micro_batch), world.samples.hash_of(step, micro_batch))
        done = self._done if self._consent is None else self._through
        world.after_work(step, micro_batch, worker, worker.node, done, micro_batch, made)
        worker.boundary("computing")

    # ---- in a replica group ----

    def _agreed(self, proposal: Proposal) -> None:
        self._agreed_on = proposal
        self._worker.machine.accept_proposal(proposal.number)
        self._compute(proposal.number)

    def _through(self, micro_batch: int, made: SimGradient) -> None:
        """Finish this worker's part, and continue when all workers have finished."""
        worker = self._worker
        if self._consent is not None and self._agreed_on is not None and not worker.hung:
            worker.busy = "together"
            self._consent.page.finish(worker.id, self._agreed_on, lambda: worker.deliver(self._done, micro_batch, made))
