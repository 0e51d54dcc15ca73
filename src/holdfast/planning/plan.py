"""One call from loads to a plan: allocation, placement, migration.

Axes: L layers, E experts, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from holdfast.errors import BadInputError
from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.planning.moving.migration import OPTIMAL_UP_TO_NODES, Migration, node_kinds, plan_migration
from holdfast.planning.placement.allocation import Guarantee, Shortage, allocate
from holdfast.planning.placement.best import Best
from holdfast.planning.placement.front import Option, options, weighed
from holdfast.planning.placement.mro import Mro
from holdfast.planning.placement.spread import Compact, Spread
from holdfast.planning.placement.strategy import PlacementProblem, Strategy, fewest_hosts
from holdfast.planning.survival.odds import as_rates

#: The balance weight where the fault threshold asked for does not fit.
PAYS_OFF = 1.0


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
    #: What would have survived more, where balance weighed more; its busiest node is busier.
    passed_over: Option | None = None

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
    balance_weight: float | None = None,
    failure_rates: FloatArray | None = None,
) -> Plan | Shortage:
    """Plan all layers from `loads` `(L, E)` for nodes with `slots` `(N,)`.

    `held` `(L, E, N)`: replicas the nodes hold now, a column per node (0 for joiners): the plan is then mapped to the
    nodes so that the fewest experts move. `racks` `(N,)`; `failure_weights` `(N + 1,)` (both see `PlacementProblem`).

    `balance_weight`, for the strategy `best`: how large a share of losses may be fatal for a busiest node that has one
    mean node's work less; 0: survival first, balance only among equals. None: 0 while each expert lives on as many
    nodes as asked; `PAYS_OFF` where that does not fit: then what is left of survival must be worth its price.

    `failure_rates` `(N,)`, for the strategy `best`: how often each node fails, in any unit. What few nodes hold then
    goes to those that fail least, and leaves a node whose rate rises.

    Raises `BadInputError` for bad loads, weights or rates; returns a `Shortage` for more experts than slots.
    """
    _check_weight(balance_weight)
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
        failure_rates=as_rates(failure_rates, slots.size),
    )
    if balance_weight is None:
        balance_weight = PAYS_OFF if threshold.given < threshold.asked else 0.0
    passed_over = None
    if isinstance(strategy, Best) and balance_weight:
        counts, passed_over = _weighed(problem, balance_weight)
    else:
        counts = strategy.place(problem)
    migration = None if held is None else _migration(problem, held, counts, strategy)
    return Plan(
        counts=counts if migration is None else migration.counts,
        slots=slots,
        # Strategies without a guarantee (compact) give what they give.
        fault_threshold=Guarantee(asked=threshold.asked, given=min(threshold.given, fewest_hosts(counts))),
        uniform_layers=allocation.uniform_layers,
        migration=migration,
        passed_over=passed_over,
    )


def _migration(problem: PlacementProblem, held: IntArray, counts: IntArray, strategy: Strategy) -> Migration:
    """Return how to get from the replicas `held` `(L, E, N)` to these `counts`."""
    # On many nodes a second look at the roles costs more than it saves; where rates tell nodes apart it would mix them.
    many = problem.nodes > OPTIMAL_UP_TO_NODES
    mapped = isinstance(strategy, Best) and (many or problem.failure_rates is not None)
    return plan_migration(held, counts, kinds=node_kinds(problem.slots, problem.racks), mapped=mapped)


def _check_weight(balance_weight: float | None) -> None:
    if balance_weight is not None and not 0 <= balance_weight < np.inf:
        raise BadInputError(f"balance weight is {balance_weight:g}: give a number of at least 0")


def _weighed(problem: PlacementProblem, balance_weight: float) -> tuple[IntArray, Option | None]:
    """Return the placement `(L, E, N)` that survives enough for how busy it is, and the one that survives most, if that
    is another."""
    found = options(problem)
    chosen = weighed(found, balance_weight, problem.failure_weights)
    return chosen.counts, None if chosen is found[0] else found[0]
