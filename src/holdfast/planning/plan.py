"""One call from loads to a plan: allocation, placement, migration.

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.planning.moving.migration import Migration, node_kinds, plan_migration
from holdfast.planning.placement.allocation import Guarantee, Shortage, allocate
from holdfast.planning.placement.best import Best
from holdfast.planning.placement.mro import Mro
from holdfast.planning.placement.spread import Compact, Spread
from holdfast.planning.placement.strategy import PlacementProblem, Strategy, fewest_hosts


def strategies() -> dict[str, Strategy]:
    """Return all placement strategies by name."""
    return {strategy.name: strategy for strategy in (Best(), Mro(), Spread(), Compact())}


def strategy_named(name: str) -> Strategy:
    """Return a strategy by its name; raises `BadInputError` for a name that is none."""
    known = strategies()
    if name not in known:
        raise BadInputError(f"strategy is {name!r}: choose one of {', '.join(known)}")
    return known[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where every replica of every layer lives."""

    #: `(L, E, N)` replicas per node.
    counts: IntArray
    #: `(N,)`
    slots: IntArray
    fault_threshold: Guarantee
    #: Layers that had no load and were planned as uniform.
    uniform_layers: tuple[int, ...]
    #: How to get there from what the nodes held; None for a first plan.
    migration: Migration | None

    @property
    def replicas(self) -> IntArray:
        """Replicas per layer and expert, `(L, E)`."""
        return self.counts.sum(axis=2)


def make_plan(
    loads: ArrayLike,
    slots: IntArray,
    *,
    fault_threshold: int,
    strategy: Strategy,
    held: IntArray | None = None,
    racks: IntArray | None = None,
    failure_weights: FloatArray | None = None,
) -> Plan | Shortage:
    """Plan all layers from `loads` `(L, E)` for nodes with `slots` `(N,)`.

    `held` `(L, E, N)`: replicas the nodes hold now, a column per node (0 for joiners): the plan is then mapped to the
    nodes so that the fewest experts move. `racks` `(N,)`; `failure_weights` `(N + 1,)` (both see `PlacementProblem`).

    Raises `BadInputError` for bad loads; returns a `Shortage` for more experts than slots.
    """
    allocation = allocate(loads, slots, fault_threshold=fault_threshold)
    if isinstance(allocation, Shortage):
        return allocation
    threshold = allocation.fault_threshold
    problem = PlacementProblem(
        replicas=allocation.replicas,
        slots=slots,
        fault_threshold=threshold.given,
        racks=racks,
        previous=held,
        failure_weights=failure_weights,
        loads=allocation.tokens.astype(np.float64),
    )
    counts = strategy.place(problem)
    migration = None if held is None else plan_migration(held, counts, kinds=node_kinds(slots, racks))
    return Plan(
        counts=counts if migration is None else migration.counts,
        slots=slots,
        # Strategies without a guarantee (compact) give what they give.
        fault_threshold=Guarantee(asked=threshold.asked, given=min(threshold.given, fewest_hosts(counts))),
        uniform_layers=allocation.uniform_layers,
        migration=migration,
    )
