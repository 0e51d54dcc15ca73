"""The experts in a simulated worker's memory: of which step each is, whatever the worker's machine believes.

Axes: L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from holdfast.coordination.experts.placing import count_by_node
from holdfast.coordination.progress.costs import MeasuredCosts
from holdfast.coordination.progress.loads import encode_loads
from holdfast.planning import CostModel
from holdfast.planning.arrays import IntArray
from holdfast.protocol.messages.worker import Loads
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import ExpertShape, GenerationPlan

if TYPE_CHECKING:
    from tests.simulation.faults.plans import FaultPlan

LOADS_EVERY = 2


class FreeMoves(MeasuredCosts):
    """Simulated steps are too short for any migration to pay: here nothing costs anything, so that some happen."""

    def model(self, *, token_s: float, expert_bytes: int) -> CostModel:
        return CostModel(token_s=token_s, expert_bytes=expert_bytes, bandwidth=1e12, pause_s=0.0)


def shape_of(plan: FaultPlan) -> ExpertShape | None:
    """Return the experts of a job, None for a dense one. Where the plan says nothing, every node has room for all."""
    if not plan.experts:
        return None
    return ExpertShape(layers=2, experts=plan.experts, slots=plan.slots or plan.experts + 1)


class StoredExperts:
    """The step that each expert `(L, E)` in memory is of; -1 where there is none. At first all initial ones."""

    def __init__(self, shape: ExpertShape) -> None:
        self.shape = shape
        self._steps = np.zeros((shape.layers, shape.experts), dtype=np.int64)
        #: whose tokens are computed here in the step under way, as replicas
        self.serving = np.zeros_like(self._steps)
        #: those that have come beside a step: they are served by nobody here before it is applied
        self._aside = self._nothing
        #: what is still to come beside the step, and in which generation: replicas by who sends them
        self._coming: dict[str, IntArray] = {}
        self._generation = 0

    @property
    def _nothing(self) -> IntArray:
        return np.full((self.shape.layers, self.shape.experts), -1, dtype=np.int64)

    @property
    def _whole(self) -> IntArray:
        return np.maximum(self._steps, self._aside)

    @property
    def steps(self) -> tuple[int, ...]:
        """What is here, in one line: what this worker can give to a migration."""
        return tuple(int(step) for step in self._steps.flat)

    def of(self, counts: IntArray) -> tuple[int, ...]:
        """Return these alone, as `steps`."""
        return tuple(int(step) for step in np.where(counts > 0, self._whole, -1).flat)

    def keep(self, counts: IntArray) -> bool:
        """Let go of all others; False where one of these is not here."""
        self._steps, self._aside = np.where(counts > 0, self._whole, -1), self._nothing
        self._coming = {}
        return bool((self._steps[counts > 0] >= 0).all())

    def expect(self, generation: int, coming: dict[str, IntArray]) -> None:
        """So many replicas are to come from others, beside the first step of a generation."""
        self._generation, self._coming = generation, dict(coming)

    def awaits(self, generation: int, sender: str = "") -> bool:
        """Return whether something is still to come in a generation, from this sender or from any."""
        return generation == self._generation and (sender in self._coming if sender else bool(self._coming))

    def land(self, sender: str, offers: tuple[int, ...]) -> None:
        """All has come that a sender was to send."""
        counts, offered = self._coming.pop(sender), np.array(offers).reshape(self._steps.shape)
        self._aside = np.where(counts > 0, offered, self._aside)

    def fetch(self, offers: tuple[int, ...], counts: IntArray) -> bool:
        """Hold these too, from what all members had; False where nobody had one."""
        offered = np.array(offers).reshape(self._steps.shape)
        self._steps = np.where((counts > 0) & (self._steps < 0), offered, self._steps)
        return bool((self._steps[counts > 0] >= 0).all())

    def load(self, counts: IntArray, step: int) -> None:
        """Read these from the checkpoint of a step, over all that was here."""
        self._steps, self._aside = np.where(counts > 0, step, -1), self._nothing

    def take_up(self, counts: IntArray, steps: tuple[int, ...]) -> None:
        """Have these, as they were put away, in place of all that was here."""
        self.load(counts, 0)
        self._steps = np.where(counts > 0, np.array(steps).reshape(self._steps.shape), -1)

    def apply(self, counts: IntArray, step: int) -> bool:
        """Keep only these, and train them by one step; False where they are not of the step before."""
        whole = self.are_of(counts, step - 1)
        self._steps, self._aside = np.where(counts > 0, step, -1), self._nothing
        return whole

    def are_of(self, counts: IntArray, step: int) -> bool:
        """Return whether all these are here, and of that step."""
        return bool((self._whole[counts > 0] == step).all())

    def serves(self, step: int) -> bool:
        """Return whether tokens of the step after this one can be computed here: what lies aside serves nobody."""
        return bool((self._steps[self.serving > 0] == step).all())


def pool(offers: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return what all members together can give; they have let go of all that is of another state."""
    return tuple(map(max, zip(*offers, strict=True)))


def drifting_loads(shape: ExpertShape, worker: str, generation: int, step: int, rng: Random) -> Loads:
    """Return a report of loads that drift."""
    tokens = np.array([[rng.expovariate(1.0) for _ in range(shape.experts)] for _ in range(shape.layers)])
    return Loads(
        worker=worker, generation=generation, step=step, tokens=encode_loads(tokens), expert_bytes=1, token_s=1.0
    )


def broken_guarantee(plan: GenerationPlan, shape: ExpertShape, wanted_back: Collection[str] = ()) -> str:
    """Return what a plan gives otherwise than it says, or than it could: "" if all is well.

    Args:
        wanted_back: nodes that a pool takes from the job: what they have, others are to have too, as far as these can.
    """
    experts = plan.expert_plan
    if experts is None:
        return "there is no placement"
    counts = count_by_node(plan.workers, experts.placement, shape)
    nodes = len({node_of(worker) for worker in plan.workers}.difference(wanted_back))
    fewest, possible = (
        int((counts > 0).sum(axis=2).min()),
        min(experts.asked, nodes, shape.slots * nodes // shape.experts),
    )
    if fewest < experts.given or experts.given < possible:
        return f"an expert lives on {fewest} nodes; {experts.given} are said, {possible} are possible"
    return ""
