"""Simulated units: several worker processes of a node that are one replica (docs/layouts.md).

They agree on each micro-batch by a page that all share, compute it together, and die together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast.protocol.layouts.proposals import Proposal
from holdfast.simulation.machines.host import WorkerHost
from holdfast.simulation.machines.training import SimGradient, gradient


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


class Work:
    """A worker's micro-batches: alone, or in its unit, with which it agrees on each and computes it."""

    def __init__(self, worker: WorkerHost, page: Page | None, done: Callable[[int, SimGradient], object]) -> None:
        """Compute nothing yet.

        Args:
            page: what the unit shares, None where the worker is alone.
            done: is told of each micro-batch that is computed, by all places.
        """
        self._worker, self._page, self._done = worker, page, done
        self._lies = False
        #: that the unit has agreed on last
        self._agreed_on: Proposal | None = None

    def begin(self, micro_batch: int) -> None:
        """The machine is about to compute one: do so, or bring it to the page, after a while."""
        worker = self._worker
        if self._page is None:
            self._compute(micro_batch)
            return
        worker.busy, self._lies = "propose", False
        worker.world.after("pause", worker, self._bring, self._page)
        worker.boundary("proposing")

    def look(self) -> None:
        """An order has come: where the unit's consent is waited for in vain, withdraw, after a while."""
        if self._page is not None and self._worker.busy == "propose" and not self._wanted:
            self._worker.world.after("pause", self._worker, self._withdraw, self._page)

    def _compute(self, micro_batch: int) -> None:
        worker, world, step = self._worker, self._worker.world, self._worker.machine.step
        worker.busy, worker.page.micro_batch = "compute", micro_batch
        made = SimGradient(gradient(worker.state, step, micro_batch), world.samples.hash_of(step, micro_batch))
        done = self._done if self._page is None else self._through
        world.after_work(step, micro_batch, worker, worker.node, done, micro_batch, made)
        worker.boundary("computing")

    # ---- in a unit ----

    @property
    def _wanted(self) -> bool:
        proposal = self._worker.machine.proposal
        return proposal is not None and self._worker.machine.still_wanted(proposal.number)

    def _bring(self, page: Page) -> None:
        worker, proposal = self._worker, self._worker.machine.proposal
        if not worker.hung and worker.busy == "propose" and proposal is not None and not self._lies:
            self._lies = True
            page.propose(worker.id, proposal, lambda: worker.world.after("pause", worker, self._agreed, proposal))

    def _withdraw(self, page: Page) -> None:
        worker, proposal = self._worker, self._worker.machine.proposal
        if worker.hung or worker.busy != "propose" or proposal is None or self._wanted:
            return
        if self._lies and not page.withdraw(worker.id):
            return  # (all have agreed, and it is about to be told)
        worker.machine.withdrawn(proposal.number)
        worker.busy = ""
        worker.advance()

    def _agreed(self, proposal: Proposal) -> None:
        if not self._worker.hung:
            self._agreed_on = proposal
            self._worker.machine.agreed(proposal.number)
            self._compute(proposal.number)

    def _through(self, micro_batch: int, made: SimGradient) -> None:
        """This place has done its part; go on once all have."""
        worker = self._worker
        if self._page is not None and self._agreed_on is not None and not worker.hung:
            worker.busy = "together"
            self._page.finish(worker.id, self._agreed_on, lambda: worker.deliver(self._done, micro_batch, made))
