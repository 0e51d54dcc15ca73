"""The experts of one worker from generation to generation: which are here, which are to be, and what a report says.

Entering a generation changes the placement tentatively: what was held stays until the generation's first commit
operation has passed. That proves that everybody has all it is to host, so that a migration that was broken off loses
nothing. What is missing comes before anybody computes, or, after a swap that says so, beside the first step: then
nobody is READY before all that it is to host is here, and those serve the experts in that step who held them before.

A loss is noted before the shell carries it out, a gain after: at any moment all that is noted here is in memory.

Axes: L layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.coordination.experts.blobs import decode, encode, everything
from holdfast.errors import JobFailedError
from holdfast.planning.arrays import IntArray
from holdfast.protocol.plan import DecisionKind, ExpertPlan, ExpertShape


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """What a worker does to take up a placement: let go of all but `keep` (replicas `(L, E)`), then fetch the rest.

    bring: experts travel between the members, and all of them take part; `beside` the first step, or before it.
    serving: which experts each rank serves in that step, as a plan has them.
    """

    keep: IntArray
    bring: bool
    beside: bool
    serving: tuple[bytes, ...]


class HeldExperts:
    """What one worker holds, as replicas per layer and expert `(L, E)`."""

    def __init__(self, shape: ExpertShape) -> None:
        """Hold all initial experts, as a script has made them."""
        self.shape = shape
        #: what is here with the state of the applied step
        self.held: IntArray = decode(everything(shape), shape)
        #: what of it stays once a commit operation of the generation has passed; more where experts are still to come
        self.placed: IntArray = self.held
        #: what is missing comes while the first step of the generation is computed
        self.beside = False
        #: these are the experts that the script made, all of them, never trained nor replaced
        self.initial = True

    @property
    def blob(self) -> bytes:
        """What a report says is held now."""
        return encode(self.held)

    @property
    def next_blob(self) -> bytes:
        """What a report says will be held once the step that is ready here is applied."""
        return encode(self.placed)

    @property
    def whole(self) -> bool:
        """True where all is here that the placement gives this worker."""
        return not ((self.placed > 0) & (self.held == 0)).any()

    def overwrite(self) -> None:
        """A checkpoint is about to be read over what is here."""
        self.initial = False

    def loaded(self, plan: ExpertPlan, rank: int) -> None:
        """A checkpoint's experts are here: those that the plan gives this rank, and no others."""
        self.held = self.placed = decode(plan.placement[rank], self.shape)
        self.initial = False

    def take_up(self, plan: ExpertPlan, rank: int, decision: DecisionKind | None) -> Rearrangement:
        """Take up a generation's placement, and note the loss of what does not count in it.

        That is experts of a state that was replaced by another worker's, or some that had just come when a Stop was
        obeyed, before the report could say so.

        Args:
            decision: what the generation began with, None after a swap.

        Raises:
            JobFailedError: the initial experts are wanted, and are not here any more.
            ValueError: the plan counts on what is not here.
        """
        placed = decode(plan.placement[rank], self.shape)
        moves = decision not in (DecisionKind.START, DecisionKind.ROLLBACK)
        if decision is DecisionKind.START and not self.initial:
            raise JobFailedError("the initial experts are wanted, but this worker has none any more")
        # Everybody has made or loaded its own where nothing moves.
        counted = decode(plan.held[rank], self.shape) if moves else self.held
        bring = moves and plan.moves > 0
        if ((counted > 0) & (self.held == 0)).any():
            raise ValueError(f"the plan says {counted.tolist()} is held, here is {self.held.tolist()}")
        if not bring and ((placed > 0) & (counted == 0)).any():
            raise ValueError(f"the plan wants {placed.tolist()} and moves nothing, here is {counted.tolist()}")
        if bring or ((counted == 0) & (self.held > 0)).any():
            self.initial = False
        self.held, self.placed = counted, placed
        self.beside = bring and plan.beside and decision is None
        serving = plan.held if self.beside else plan.placement
        return Rearrangement(keep=counted, bring=bring, beside=self.beside, serving=serving)

    def brought(self) -> None:
        """All that the placement gives this worker is here, beside what was held."""
        self.held = np.maximum(self.held, self.placed)

    def passed(self) -> None:
        """A commit operation of the generation has passed: what lives elsewhere now goes."""
        self.held = self.placed
        self.initial = False
