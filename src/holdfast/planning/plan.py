"""From loads to a plan in one call: allocation, placement, migration.

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
from holdfast.planning.placement.front import Option, choose_by_weight, find_options
from holdfast.planning.placement.mro import Mro
from holdfast.planning.placement.spread import Compact, Spread
from holdfast.planning.placement.strategy import PlacementProblem, Strategy, fewest_hosts
from holdfast.planning.survival.odds import as_rates

#: The balance weight if the requested fault threshold does not fit.
PAYS_OFF = 1.0


def strategies() -> dict[str, Strategy]:
    """Return all placement strategies by name."""
    return {strategy.name: strategy for strategy in (Best(), Mro(), Spread(), Compact())}


def strategy_named(name: str) -> Strategy:
    """Return a placement strategy by its name; raise `BadInputError` if the name is unknown."""
    known = strategies()
    if name not in known:
        raise BadInputError(f"strategy is {name!r}: choose one of {', '.join(known)}")
    return known[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The nodes of every replica of every layer."""

    #: `(L, E, N)` replicas per node.
    counts: IntArray
    #: `(N,)`
    slots: IntArray
    fault_threshold: Guarantee
    #: Layers that had no load and were planned as uniform.
    uniform_layers: tuple[int, ...]
    #: The migration from the replicas held before; None for a first plan.
    migration: Migration | None
    #: The placement that survives more but has a busier busiest node, if it was rejected for its balance.
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

    Args:
        loads: Tokens per layer and expert.
        slots: Slots per node, for one layer.
        fault_threshold: The number of distinct nodes that each expert should live on.
        strategy: The placement strategy.
        held: `(L, E, N)` replicas that the nodes hold now, 0 for joining nodes. If given, the plan is mapped to the
            nodes so that the fewest experts move.
        racks: `(N,)`; see `PlacementProblem`.
        failure_weights: `(N + 1,)`; see `PlacementProblem`.
        balance_weight: For the strategy `best`: the share of fatal losses that is accepted for a busiest node with one
            mean node's work less. 0 puts survival first and balances only among equals. None means 0 if each expert
            lives on as many nodes as asked, else `PAYS_OFF`: then further survival must be worth its price.
        failure_rates: `(N,)` how often each node fails, in any unit, for the strategy `best`. Experts with few hosts go
            to the nodes that fail least, and leave a node when its rate rises.

    Returns:
        The plan, or a `Shortage` if there are more experts than slots.

    Raises:
        BadInputError: Loads, weights or rates are wrong.
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
        counts, passed_over = _place_weighed(problem, balance_weight)
    else:
        counts = strategy.place(problem)
    migration = None if held is None else _plan_migration(problem, held, counts, strategy)
    return Plan(
        counts=counts if migration is None else migration.counts,
        slots=slots,
        # A strategy without a guarantee (compact) may give less.
        fault_threshold=Guarantee(asked=threshold.asked, given=min(threshold.given, fewest_hosts(counts))),
        uniform_layers=allocation.uniform_layers,
        migration=migration,
        passed_over=passed_over,
    )


def _plan_migration(problem: PlacementProblem, held: IntArray, counts: IntArray, strategy: Strategy) -> Migration:
    """Return the migration from the replicas `held` `(L, E, N)` to `counts` `(L, E, N)`.

    Roles are assigned to nodes so that few experts move, unless the strategy `best` has already assigned them, which it
    does on many nodes or with failure rates.
    """
    # On many nodes, assigning roles again costs more than it saves. With failure rates it would undo their assignment.
    many = problem.nodes > OPTIMAL_UP_TO_NODES
    mapped = isinstance(strategy, Best) and (many or problem.failure_rates is not None)
    return plan_migration(held, counts, kinds=node_kinds(problem.slots, problem.racks), mapped=mapped)


def _check_weight(balance_weight: float | None) -> None:
    """Raise `BadInputError` unless the weight is None, or finite and at least 0."""
    if balance_weight is not None and not 0 <= balance_weight < np.inf:
        raise BadInputError(f"balance weight is {balance_weight:g}: give a number of at least 0")


def _place_weighed(problem: PlacementProblem, balance_weight: float) -> tuple[IntArray, Option | None]:
    """Return the placement `(L, E, N)` with the best trade-off between survival and balance, and the one passed over.

    The second is the placement that survives most; None if it is the first.
    """
    found = find_options(problem)
    chosen = choose_by_weight(found, balance_weight, problem.failure_weights)
    return chosen.counts, None if chosen is found[0] else found[0]
