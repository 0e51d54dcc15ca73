"""The experts of one worker, by the rules of the runtime: what is held is let go of only once a commit has passed."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from holdfast.coordination.costs import MeasuredCosts
from holdfast.coordination.experts import counts_by_node, decode, encode
from holdfast.coordination.loads import encode_loads
from holdfast.planning import CostModel
from holdfast.planning.arrays import IntArray
from holdfast.protocol.plan import DecisionKind, EpochPlan, ExpertShape
from holdfast.protocol.worker import Loads

if TYPE_CHECKING:
    from holdfast.simulation.faults import FaultPlan

LOADS_EVERY = 2


class FreeMoves(MeasuredCosts):
    """Simulated steps are too short for any migration to pay: here nothing costs anything, so that some happen."""

    def model(self, *, token_s: float, expert_bytes: int) -> CostModel:
        return CostModel(token_s=token_s, expert_bytes=expert_bytes, bandwidth=1e12, pause_s=0.0)


def shape_of(plan: FaultPlan) -> ExpertShape | None:
    """Return the experts of a job, None for a dense one. Every node has room for all, so that none has to wait."""
    if not plan.experts:
        return None
    return ExpertShape(layers=2, experts=plan.experts, slots=plan.experts + 1)


class HeldExperts:
    """What one worker holds, `[L, E]` replicas. Fresh, it has all initial experts."""

    def __init__(self, shape: ExpertShape) -> None:
        self.shape = shape
        self._counts = np.ones((shape.layers, shape.experts), dtype=np.int64)
        self._placed = self._counts

    @property
    def blob(self) -> bytes:
        """What a report says."""
        return encode(self._counts)

    def load(self, plan: EpochPlan, rank: int) -> None:
        """Take from a checkpoint what the plan gives this rank."""
        self._counts = self._placed = self._column(plan, rank)

    def enter(self, plan: EpochPlan, rank: int, decision: DecisionKind | None) -> bool:
        """Let go of what does not count in an epoch; False where the plan says held what is not here."""
        assert plan.experts is not None
        self._placed = self._column(plan, rank)
        if decision in (DecisionKind.START, DecisionKind.ROLLBACK):
            return True
        held = decode(plan.experts.held[rank], self.shape)
        missing = bool(((held > 0) & (self._counts == 0)).any())
        self._counts = held
        return not missing

    def brought(self, offers: IntArray) -> bool:
        """Hold what the plan wants beside what is held; False where nobody had some of it."""
        self._counts = np.maximum(self._counts, self._placed)
        return bool((offers[self._placed > 0] > 0).all())

    def passed(self) -> None:
        """A commit operation of the epoch has passed: what lives elsewhere now may go."""
        self._counts = self._placed

    def offers(self, blobs: Iterable[bytes]) -> IntArray:
        """Return what all members hold together."""
        return np.sum([decode(blob, self.shape) for blob in blobs], axis=0)

    def loads(self, worker: str, epoch: int, step: int, rng: Random) -> Loads:
        """Return a report of loads that drift."""
        tokens = np.array([[rng.expovariate(1.0) for _ in range(self.shape.experts)] for _ in range(self.shape.layers)])
        return Loads(worker=worker, epoch=epoch, step=step, tokens=encode_loads(tokens), expert_bytes=1, token_s=1.0)

    def _column(self, plan: EpochPlan, rank: int) -> IntArray:
        assert plan.experts is not None
        return decode(plan.experts.placement[rank], self.shape)


def broken_guarantee(plan: EpochPlan, shape: ExpertShape) -> str:
    """Return what a plan gives otherwise than it says, or than it could: "" if all is well."""
    experts = plan.experts
    if experts is None:
        return "there is no placement"
    counts = counts_by_node(plan.workers, experts.placement, shape)
    fewest, possible = int((counts > 0).sum(axis=2).min()), min(experts.asked, counts.shape[2])
    if fewest < experts.given or experts.given < possible:
        return f"an expert lives on {fewest} nodes; {experts.given} are said, {possible} are possible"
    return ""
