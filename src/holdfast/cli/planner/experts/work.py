"""What `holdfast experts plan` does with its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.cli.output import print_json, print_line
from holdfast.cli.planner.experts.compare import EngineShape, compare, comparison_as_json, comparison_as_text
from holdfast.cli.planner.experts.inputs import (
    parse_slots,
    parse_weights,
    read_loads,
    read_racks,
    read_rates,
    read_windows,
)
from holdfast.cli.planner.experts.plot import draw
from holdfast.cli.planner.experts.report import Figures, as_json, as_text
from holdfast.errors import BadInputError
from holdfast.planning import (
    PlacementProblem,
    Plan,
    Shortage,
    Strategy,
    allocate,
    as_weights,
    default_weights,
    make_plan,
    recovery_curve,
    strategies,
    strategy_named,
)
from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.planning.loads import as_token_counts
from holdfast.planning.placement.front import Option, find_options, select_pareto


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """The command's options, as given."""

    loads: Path
    slots: str
    nodes: int | None
    iteration: int | None
    fault_threshold: int
    strategy: str
    racks: Path | None
    failure_weights: str | None
    failure_rates: Path | None
    balance_weight: float | None
    pareto: bool
    compare: str | None
    gpus_per_node: int
    groups: int
    plot: Path | None
    as_json: bool

    def without_effect(self) -> list[str]:
        """Return the given options that have no effect next to the others."""
        if self.compare is None:
            given = {"--gpus-per-node": self.gpus_per_node != 1, "--groups": self.groups != 1}
        else:
            given = {
                "--expert-placement": self.strategy != "best",
                "--racks": self.racks is not None,
                "--failure-weights": self.failure_weights is not None,
                "--failure-rates": self.failure_rates is not None,
                "--balance-weight": self.balance_weight is not None,
                "--pareto": self.pareto,
                "--plot": self.plot is not None,
            }
        return [name for name, is_given in given.items() if is_given]


def run(request: PlanRequest) -> None:
    """Plan the placement of experts, print it, and draw it if a plot file is given. With `compare`, compare placements.

    Raises:
        BadInputError: an input is wrong, or an option has no effect.
    """
    per_node = parse_slots(request.slots, request.nodes)
    count = int(per_node.size)
    if idle := request.without_effect():
        where = "with" if request.compare is not None else "without"
        raise BadInputError(f"{', '.join(idle)}: {where} --compare that changes nothing: leave it out")
    if request.compare is not None:
        _compare(request, per_node)
        return
    tokens = as_token_counts(read_loads(request.loads, request.iteration))
    racks = None if request.racks is None else read_racks(request.racks, count)
    shares = None if request.failure_weights is None else parse_weights(request.failure_weights)
    weights = None if shares is None else as_weights(shares, count)
    rates = None if request.failure_rates is None else read_rates(request.failure_rates, count)

    def plan_by(strategy: Strategy) -> Plan:
        """Return the plan by a strategy. Raises `BadInputError` if the slots do not suffice."""
        plan = make_plan(
            tokens,
            per_node,
            fault_threshold=request.fault_threshold,
            strategy=strategy,
            racks=racks,
            failure_weights=weights,
            balance_weight=request.balance_weight,
            failure_rates=rates,
        )
        if isinstance(plan, Shortage):
            raise BadInputError(str(plan))
        return plan

    plan = plan_by(strategy_named(request.strategy))
    figures = Figures(
        plan=plan,
        name=request.strategy,
        tokens=tokens.astype(np.float64),
        racks=racks,
        rates=rates,
        front=_front(tokens, per_node, request.fault_threshold, racks, weights, rates) if request.pareto else None,
        weights=default_weights(count) if weights is None else weights,
    )
    if request.as_json:
        print_json(as_json(figures))
        if request.plot is None:
            return
    counts = {name: plan_by(other).counts for name, other in strategies().items()}
    curves = {name: recovery_curve(placed, rates=rates) for name, placed in counts.items()}
    if not request.as_json:
        print_line(as_text(figures, counts, curves))
    if request.plot is not None:
        draw(request.plot, plan, request.strategy, curves)


def _compare(request: PlanRequest, per_node: IntArray) -> None:
    """Print the figures of EPLB and of holdfast on a recording.

    Raises:
        BadInputError: `compare` is not eplb, nodes differ in slots, or the recording cannot be used.
    """
    if request.compare != "eplb":
        raise BadInputError(f"--compare {request.compare}: there is eplb to compare with")
    if (per_node != per_node[0]).any():
        raise BadInputError(f"--expert-slots {request.slots}: EPLB's nodes have equal slots: give one number")
    windows = read_windows(request.loads, request.iteration)
    shape = EngineShape(
        nodes=int(per_node.size),
        gpus_per_node=request.gpus_per_node,
        slots_per_node=int(per_node[0]),
        groups=request.groups,
        fault_threshold=request.fault_threshold,
    )
    found = compare(windows, shape)
    if request.as_json:
        print_json({"windows": len(windows), "policies": comparison_as_json(found)})
    else:
        print_line(comparison_as_text(found, len(windows)))


def _front(
    tokens: IntArray,
    slots: IntArray,
    threshold: int,
    racks: IntArray | None,
    weights: FloatArray | None,
    rates: FloatArray | None,
) -> list[Option]:
    """Return the placements between the safest and the most even one, of which no other is better in both.

    Args:
        slots: of each node.
        threshold: the fault threshold.
        racks: of each node, or None.
        weights: by number of lost nodes, or None.
        rates: of the failures of each node, or None.

    Raises:
        BadInputError: the slots do not suffice.
    """
    allocation = allocate(tokens, slots, fault_threshold=threshold)
    if isinstance(allocation, Shortage):
        raise BadInputError(str(allocation))
    problem = PlacementProblem(
        replicas=allocation.replicas,
        slots=slots,
        fault_threshold=allocation.fault_threshold.given,
        racks=racks,
        failure_weights=weights,
        failure_rates=rates,
        loads=allocation.tokens.astype(np.float64),
    )
    return select_pareto(find_options(problem))
