"""The experts in a simulated worker's memory and the step of each, independent of the worker's machine.

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
    """A cost model without costs, because no migration would pay off in the short simulated steps."""

    def model(self, *, token_s: float, expert_bytes: int) -> CostModel:
        return CostModel(token_s=token_s, expert_bytes=expert_bytes, bandwidth=1e12, pause_s=0.0)


def shape_of(plan: FaultPlan) -> ExpertShape | None:
    """Return the expert shape of a job, or None if it is dense. By default every node can hold all experts."""
    if not plan.experts:
        return None
    return ExpertShape(layers=2, experts=plan.experts, slots=plan.slots or plan.experts + 1)


class StoredExperts:
    """The step of each expert `(L, E)` in memory, or -1 if it is absent. At first all experts are initial."""

    def __init__(self, shape: ExpertShape) -> None:
        self.shape = shape
        self._steps = np.zeros((shape.layers, shape.experts), dtype=np.int64)
        #: The replicas that serve tokens on this worker in the current step.
        self.serving = np.zeros_like(self._steps)
        #: The experts that arrived during a step; they serve no tokens until it is applied.
        self._aside = self._nothing
        #: The replicas still expected during the step, by sender, and their generation.
        self._coming: dict[str, IntArray] = {}
        self._generation = 0

    @property
    def _nothing(self) -> IntArray:
        return np.full((self.shape.layers, self.shape.experts), -1, dtype=np.int64)

    @property
    def _newest(self) -> IntArray:
        return np.maximum(self._steps, self._aside)

    @property
    def steps(self) -> tuple[int, ...]:
        """The step of each expert here, flattened: the worker's offer to a migration."""
        return tuple(int(step) for step in self._steps.flat)

    def of(self, counts: IntArray) -> tuple[int, ...]:
        """Return the steps of these experts only, in the format of `steps`."""
        return tuple(int(step) for step in np.where(counts > 0, self._newest, -1).flat)

    def keep(self, counts: IntArray) -> bool:
        """Drop all other experts; return False if one of these is missing."""
        self._steps, self._aside = np.where(counts > 0, self._newest, -1), self._nothing
        self._coming = {}
        return bool((self._steps[counts > 0] >= 0).all())

    def expect(self, generation: int, coming: dict[str, IntArray]) -> None:
        """Expect these replicas from other workers during the first step of a generation."""
        self._generation, self._coming = generation, dict(coming)

    def awaits(self, generation: int, sender: str = "") -> bool:
        """Return whether replicas are still expected in a generation, from this sender or from any."""
        return generation == self._generation and (sender in self._coming if sender else bool(self._coming))

    def land(self, sender: str, offers: tuple[int, ...]) -> None:
        """Store all experts that a sender has sent."""
        counts, offered = self._coming.pop(sender), np.array(offers).reshape(self._steps.shape)
        self._aside = np.where(counts > 0, offered, self._aside)

    def fetch(self, offers: tuple[int, ...], counts: IntArray) -> bool:
        """Add these experts from the offers of all members; return False if an expert is missing."""
        offered = np.array(offers).reshape(self._steps.shape)
        self._steps = np.where((counts > 0) & (self._steps < 0), offered, self._steps)
        return bool((self._steps[counts > 0] >= 0).all())

    def load(self, counts: IntArray, step: int) -> None:
        """Replace all experts by these from the checkpoint of a step."""
        self._steps, self._aside = np.where(counts > 0, step, -1), self._nothing

    def take_up(self, counts: IntArray, steps: tuple[int, ...]) -> None:
        """Replace all experts by these from the stash."""
        self.load(counts, 0)
        self._steps = np.where(counts > 0, np.array(steps).reshape(self._steps.shape), -1)

    def apply(self, counts: IntArray, step: int) -> bool:
        """Keep only these experts and train them for one step; return False if one has another step."""
        correct = self.are_of(counts, step - 1)
        self._steps, self._aside = np.where(counts > 0, step, -1), self._nothing
        return correct

    def are_of(self, counts: IntArray, step: int) -> bool:
        """Return whether all these experts are here and have this step."""
        return bool((self._newest[counts > 0] == step).all())

    def serves(self, step: int) -> bool:
        """Return whether the served experts have this step; experts that arrived during the step do not count."""
        return bool((self._steps[self.serving > 0] == step).all())


def pool(offers: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the newest step of each expert among all members; they have dropped the experts of other states."""
    return tuple(map(max, zip(*offers, strict=True)))


def drifting_loads(shape: ExpertShape, worker: str, generation: int, step: int, rng: Random) -> Loads:
    """Return a report of loads that drift."""
    tokens = np.array([[rng.expovariate(1.0) for _ in range(shape.experts)] for _ in range(shape.layers)])
    return Loads(
        worker=worker, generation=generation, step=step, tokens=encode_loads(tokens), expert_bytes=1, token_s=1.0
    )


def broken_guarantee(plan: GenerationPlan, shape: ExpertShape, wanted_back: Collection[str] = ()) -> str:
    """Describe the error if a plan has fewer expert copies than announced or possible; "" if it is correct.

    Args:
        plan: The plan to check.
        shape: The expert shape of the job.
        wanted_back: Nodes that the pool recalls; other nodes should hold their experts, as far as possible.
    """
    experts = plan.expert_plan
    if experts is None:
        return "the plan has no placement"
    counts = count_by_node(plan.workers, experts.placement, shape)
    nodes = len({node_of(worker) for worker in plan.workers}.difference(wanted_back))
    fewest, possible = (
        int((counts > 0).sum(axis=2).min()),
        min(experts.asked, nodes, shape.slots * nodes // shape.experts),
    )
    if fewest < experts.given or experts.given < possible:
        return f"an expert is on {fewest} nodes; {experts.given} are announced, {possible} are possible"
    return ""
