"""The experts of one worker across generations: which it holds, which it will hold, and its reports of them.

Entering a generation changes the placement tentatively: held experts stay until the first commit operation of the
generation has passed. That proves that every worker has all experts that it hosts, so an interrupted migration loses
nothing. Missing experts arrive before the first step. After a swap they may arrive during that step; then no worker is
READY before all its experts have arrived, and the previous holders serve the experts in that step.

A loss is noted before the shell drops the state, and a gain after it has arrived. So all noted experts are in memory at
any time.

Axes: L layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.coordination.experts.blobs import decode_experts, encode_all_experts, encode_experts
from holdfast.errors import JobFailedError
from holdfast.planning.arrays import IntArray
from holdfast.protocol.plan import DecisionKind, ExpertPlan, ExpertShape


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """How a worker applies a placement: drop all experts except `keep`, then fetch the rest."""

    #: replicas to keep `(L, E)`
    keep: IntArray
    #: whether experts move between the members; then all members take part
    fetch: bool
    #: whether they move during the first step, not before it
    during_step: bool
    #: experts that each rank serves in that step, as in a plan
    serving: tuple[bytes, ...]


class HeldExperts:
    """The experts that one worker holds, as replicas per layer and expert `(L, E)`."""

    def __init__(self, shape: ExpertShape) -> None:
        """Hold all initial experts, as the script has made them."""
        self.shape = shape
        #: replicas that are here, with the state of the applied step
        self.held: IntArray = decode_experts(encode_all_experts(shape), shape)
        #: replicas after the generation's first commit operation; some may not have arrived yet
        self.placed: IntArray = self.held
        #: whether missing experts arrive during the first step of the generation
        self.during_step = False
        #: whether these are all experts as the script made them, untrained and not replaced
        self.initial = True

    @property
    def blob(self) -> bytes:
        """The experts that a report names as held now."""
        return encode_experts(self.held)

    @property
    def next_blob(self) -> bytes:
        """The experts that a report names as held once the ready step is applied."""
        return encode_experts(self.placed)

    @property
    def is_complete(self) -> bool:
        """Whether all experts that the placement gives this worker are here."""
        return not ((self.placed > 0) & (self.held == 0)).any()

    def mark_overwritten(self) -> None:
        """Note that a checkpoint will be read over the experts."""
        self.initial = False

    def on_loaded(self, plan: ExpertPlan, rank: int) -> None:
        """Note that a checkpoint was read: the worker holds exactly the experts that the plan gives this rank."""
        self.held = self.placed = decode_experts(plan.placement[rank], self.shape)
        self.initial = False

    def apply_placement(self, plan: ExpertPlan, rank: int, decision: DecisionKind | None) -> Rearrangement:
        """Start a generation's placement: forget held experts that the plan does not count, and return how to get the
        missing ones.

        Experts that do not count belong to a state that another worker's has replaced, or arrived when a Stop was
        obeyed, too late for the report. After a start or a rollback, every worker makes or loads its own experts, and
        nothing is fetched.

        Args:
            plan: the placement
            rank: the worker's rank
            decision: the decision with which the generation starts, or None after a swap

        Raises:
            JobFailedError: The plan needs the initial experts, and this worker no longer has them.
            ValueError: The plan counts on experts that this worker does not hold, or moves nothing although some are
                missing.
        """
        placed = decode_experts(plan.placement[rank], self.shape)
        moves = decision not in (DecisionKind.START, DecisionKind.ROLLBACK)
        if decision is DecisionKind.START and not self.initial:
            raise JobFailedError("the job starts from the initial experts, but this worker no longer has them")
        # If nothing moves, every worker has made or loaded its own experts.
        counted = decode_experts(plan.held[rank], self.shape) if moves else self.held
        bring = moves and plan.moves > 0
        if ((counted > 0) & (self.held == 0)).any():
            raise ValueError(
                f"the plan counts on experts {counted.tolist()}, and this worker holds {self.held.tolist()}"
            )
        if not bring and ((placed > 0) & (counted == 0)).any():
            raise ValueError(
                f"the plan places {placed.tolist()} and moves nothing, and this worker holds {counted.tolist()}"
            )
        if bring or ((counted == 0) & (self.held > 0)).any():
            self.initial = False
        self.held, self.placed = counted, placed
        self.during_step = bring and plan.beside and decision is None
        serving = plan.held if self.during_step else plan.placement
        return Rearrangement(keep=counted, fetch=bring, during_step=self.during_step, serving=serving)

    def on_received(self) -> None:
        """Note that all experts of the placement have arrived, in addition to the held ones."""
        self.held = np.maximum(self.held, self.placed)

    def on_committed(self) -> None:
        """Note that a commit operation of the generation has passed: drop replicas that live elsewhere."""
        self.held = self.placed
        self.initial = False
