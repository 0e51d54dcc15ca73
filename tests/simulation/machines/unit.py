"""Simulated units: several worker processes of a node that are one replica (docs/layouts.md).

They agree on each micro-batch by a page that all share, compute it together, take what they are sent together, and die
together.
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
    """What a unit's places share."""

    def propose(self, worker: str, proposal: Proposal, agreed: Callable[[], object]) -> None: ...

    def withdraw(self, worker: str) -> bool: ...

    def finish(self, worker: str, proposal: Proposal, through: Callable[[], object]) -> None: ...


class SimUnit:
    """The memory that the places of one unit share, for as long as these processes live."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._proposed: dict[str, tuple[Proposal, Callable[[], object]]] = {}
        self._through: dict[str, tuple[Proposal, Callable[[], object]]] = {}

    def propose(self, worker: str, proposal: Proposal, agreed: Callable[[], object]) -> None:
        """A place proposes; where that was the last one, all have agreed."""
        self._proposed[worker] = proposal, agreed
        self._all(self._proposed)

    def withdraw(self, worker: str) -> bool:
        """A place would rather not; False: all have agreed."""
        return self._proposed.pop(worker, None) is not None

    def finish(self, worker: str, proposal: Proposal, through: Callable[[], object]) -> None:
        """A place has done its part of a micro-batch; none is through before all have."""
        self._through[worker] = proposal, through
        self._all(self._through)

    def _all(self, said: dict[str, tuple[Proposal, Callable[[], object]]]) -> None:
        if len(said) == self._places and len({proposal for proposal, _ in said.values()}) == 1:
            calls = [call for _, call in said.values()]
            said.clear()
            for call in calls:
                call()


class Consent:
    """One place's proposals to its unit: it waits until all have made the same, or takes its own back."""

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
        """Bring something to the page, after a while.

        Args:
            wanted: asked once it lies there, and after each order; where it says no, the proposal is taken back.
            agreed: all have made the same. withdrawn: it was taken back before that.
        """
        worker = self._worker
        self._asked, self._lies = _Asked(proposal, wanted, agreed, withdrawn), False
        worker.busy = "propose"
        worker.world.after("pause", worker, self._bring, self._asked)
        worker.boundary("proposing")

    def look(self) -> None:
        """An order has come: where the unit's consent is waited for in vain, withdraw, after a while."""
        asked = self._asked
        if asked is not None and not asked.wanted():
            self._worker.world.after("pause", self._worker, self._withdraw, asked)

    def _bring(self, asked: _Asked) -> None:
        worker = self._worker
        if not worker.hung and self._asked is asked and not self._lies:
            self._lies = True
            self.page.propose(worker.id, asked.proposal, lambda: worker.world.after("pause", worker, self._go, asked))
            self.look()  # (it may not have been wanted any more when it was asked)

    def _withdraw(self, asked: _Asked) -> None:
        if self._worker.hung or self._asked is not asked or asked.wanted():
            return
        if self._lies and not self.page.withdraw(self._worker.id):
            return  # (all have agreed, and it is about to be told)
        self._asked, self._worker.busy = None, ""
        asked.withdrawn()
        self._worker.advance()

    def _go(self, asked: _Asked) -> None:
        if not self._worker.hung:
            self._asked, self._worker.busy = None, ""
            asked.agreed()


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a place has proposed; as `Consent.ask` says."""

    proposal: Proposal
    wanted: Callable[[], bool]
    agreed: Callable[[], object]
    withdrawn: Callable[[], object]


class Work:
    """A worker's micro-batches: alone, or in its unit, with which it agrees on each and computes it."""

    def __init__(self, worker: WorkerHost, consent: Consent | None, done: Callable[[int, SimGradient], object]) -> None:
        """Compute nothing yet.

        Args:
            consent: is asked of the unit, None where the worker is alone.
            done: is told of each micro-batch that is computed, by all places.
        """
        self._worker, self._consent, self._done = worker, consent, done
        #: that the unit has agreed on last
        self._agreed_on: Proposal | None = None

    def begin(self, micro_batch: int) -> None:
        """The machine is about to compute one: do so, or bring it to the page, after a while."""
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

    def look(self) -> None:
        """An order has come: nobody waits on for what is not wanted any more."""
        if self._consent is not None:
            self._consent.look()

    def _compute(self, micro_batch: int) -> None:
        worker, world, step = self._worker, self._worker.world, self._worker.machine.step
        worker.busy, worker.page.micro_batch = "compute", micro_batch
        made = SimGradient(gradient(worker.state, step, micro_batch), world.samples.hash_of(step, micro_batch))
        done = self._done if self._consent is None else self._through
        world.after_work(step, micro_batch, worker, worker.node, done, micro_batch, made)
        worker.boundary("computing")

    # ---- in a unit ----

    def _agreed(self, proposal: Proposal) -> None:
        self._agreed_on = proposal
        self._worker.machine.accept_proposal(proposal.number)
        self._compute(proposal.number)

    def _through(self, micro_batch: int, made: SimGradient) -> None:
        """This place has done its part; go on once all have."""
        worker = self._worker
        if self._consent is not None and self._agreed_on is not None and not worker.hung:
            worker.busy = "together"
            self._consent.page.finish(worker.id, self._agreed_on, lambda: worker.deliver(self._done, micro_batch, made))
