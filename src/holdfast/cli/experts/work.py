"""What `holdfast experts plan` does with its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.cli.experts.inputs import parse_slots, parse_weights, read_loads, read_racks
from holdfast.cli.experts.plot import draw
from holdfast.cli.experts.report import as_json, as_text
from holdfast.cli.output import print_json, say
from holdfast.errors import BadInputError
from holdfast.planning import (
    Plan,
    Shortage,
    Strategy,
    as_weights,
    make_plan,
    recovery_curve,
    strategies,
    strategy_named,
)


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
    plot: Path | None
    as_json: bool


def run(request: PlanRequest) -> None:
    """Plan, print and draw; raises `BadInputError` for everything users can get wrong."""
    per_node = parse_slots(request.slots, request.nodes)
    count = int(per_node.size)
    tokens = read_loads(request.loads, request.iteration)
    racks = None if request.racks is None else read_racks(request.racks, count)
    shares = None if request.failure_weights is None else parse_weights(request.failure_weights)
    weights = None if shares is None else as_weights(shares, count)

    def plan_by(strategy: Strategy) -> Plan:
        plan = make_plan(
            tokens,
            per_node,
            fault_threshold=request.fault_threshold,
            strategy=strategy,
            racks=racks,
            failure_weights=weights,
        )
        if isinstance(plan, Shortage):
            raise BadInputError(str(plan))
        return plan

    plan = plan_by(strategy_named(request.strategy))
    if request.as_json:
        print_json(as_json(plan, racks))
        if request.plot is None:
            return
    curves = {name: recovery_curve(plan_by(other).counts) for name, other in strategies().items()}
    if not request.as_json:
        say(as_text(plan, request.strategy, curves, racks))
    if request.plot is not None:
        draw(request.plot, plan, request.strategy, curves)
