"""What `holdfast experts plan` prints: a table for people, JSON for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.planning import Plan, RecoveryCurve, node_lists, rack_curve, recovery_curve
from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.planning.balance.work import busiest_over_mean
from holdfast.planning.placement.front import Option, choice_weight_ranges

#: Most lost nodes for which the choice between survival and balance is shown.
_MOST_LOST = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A plan by the strategy of this `name`, and what its figures rest on."""

    plan: Plan
    name: str
    #: `(L, E)`
    tokens: FloatArray
    #: `(N,)`; None: not given.
    racks: IntArray | None
    #: `(N,)` how often each node fails; None: all alike.
    rates: FloatArray | None
    #: What else could be chosen, the most even first; None: not asked for.
    front: list[Option] | None
    #: `(N + 1,)` how likely each number of lost nodes is.
    weights: FloatArray

    def busiest(self, counts: IntArray) -> FloatArray:
        """Return the busiest node's work over the mean node's, per layer `(L,)`, in a placement `(L, E, N)`."""
        return busiest_over_mean(counts, self.tokens)


def as_json(figures: Figures) -> dict[str, Any]:
    """Return the plan as JSON: layers, recovery, fault_threshold, busiest_node, and optional parts."""
    plan, racks = figures.plan, figures.racks
    curves = [recovery_curve(counts, rates=figures.rates) for counts in plan.counts]
    model = recovery_curve(plan.counts, rates=figures.rates)
    recovery: dict[str, Any] = {"model": _by_lost(model), "layers": [_by_lost(curve) for curve in curves]}
    if not model.exact:
        recovery["model_95_percent"] = {
            str(lost): [float(model.low[lost]), float(model.high[lost])] for lost in range(1, model.low.size)
        }
    if racks is not None:
        recovery["racks"] = _by_lost(rack_curve(plan.counts, racks))
    threshold, busiest = plan.fault_threshold, figures.busiest(plan.counts)
    result: dict[str, Any] = {
        "layers": [
            {"replicas": replicas.tolist(), "nodes": node_lists(counts)}
            for replicas, counts in zip(plan.replicas, plan.counts, strict=True)
        ],
        "recovery": recovery,
        "fault_threshold": {"asked": threshold.asked, "given": threshold.given},
        "busiest_node": {"mean": _ratio(busiest.mean()), "worst_layer": _ratio(busiest.max())},
    }
    if plan.passed_over is not None:
        result["passed_over"] = _option_as_json(plan.passed_over)
    if figures.front is not None:
        result["pareto"] = [
            _option_as_json(option) | {"balance_weight": reach}
            for option, reach in zip(figures.front, choice_weight_ranges(figures.front, figures.weights), strict=True)
        ]
    if plan.uniform_layers:
        result["uniform_layers"] = list(plan.uniform_layers)
    return result


def _ratio(value: float) -> float:
    """Return a ratio without the last digits, which rounding decides."""
    return round(float(value), 9)


def _option_as_json(option: Option) -> dict[str, Any]:
    survives = {str(lost): float(1 - share) for lost, share in enumerate(option.fatal) if lost}
    return {"name": option.name, "busiest_node": _ratio(option.busiest), "survives_at_least": survives}


def _by_lost(curve: RecoveryCurve) -> dict[str, float]:
    return {str(lost): float(value) for lost, value in enumerate(curve.probability) if lost}


def as_text(figures: Figures, counts: dict[str, IntArray], curves: dict[str, RecoveryCurve]) -> str:
    """Return the plan as text: what had to be changed, the survival and balance of all strategies, and experts by node.

    Args:
        counts: the placement `(L, E, N)` of each strategy.
        curves: the survival by number of lost nodes, of each strategy.
    """
    plan, racks = figures.plan, figures.racks
    layers, experts, nodes = plan.counts.shape
    slots = sorted(set(plan.slots.tolist()))
    per_node = str(slots[0]) if len(slots) == 1 else f"{slots[0]} to {slots[-1]}"
    threshold = plan.fault_threshold
    lines = [
        f"{experts} experts in {layers} layers on {nodes} nodes with {per_node} slots, placed by {figures.name}",
        f"fault threshold: asked {threshold.asked}, given {threshold.given}",
    ]
    if threshold.given < threshold.asked:
        lines.append("  lowered: that many distinct nodes do not fit every expert (or the strategy keeps no guarantee)")
    if plan.passed_over is not None:
        lines.append(f"  {_describe_option(plan.passed_over, figures)}")
    if plan.uniform_layers:
        lines.append(f"  without load, planned as uniform: layers {', '.join(map(str, plan.uniform_layers))}")
    by_rate = "" if figures.rates is None else ", which fail at their rates"
    lines += ["", f"probability that the whole model survives, by number of lost nodes{by_rate}:", *_table(curves)]
    if racks is not None:
        lines += ["", "the same, by number of lost racks:", *_table({figures.name: rack_curve(plan.counts, racks)})]
    lines += ["", "the busiest node's work over the mean node's (worst layer):"]
    for name, placed in counts.items():
        busiest = figures.busiest(placed)
        lines.append(f"  {name:>8s}  {busiest.mean():.3f} ({busiest.max():.3f})")
    if figures.front is not None:
        lines += ["", *_front(figures.front, figures.weights)]
    lines += ["", "experts on each node, layer 0:"]
    lines += [f"  node {node}: {' '.join(map(str, held))}" for node, held in enumerate(node_lists(plan.counts[0]))]
    return "\n".join(lines)


def _describe_option(option: Option, figures: Figures) -> str:
    """Return why the placement that survives most lost nodes (`option`) was not chosen: its busiest node has more work.

    The text compares the load of the busiest node in `option` with that in the chosen plan of `figures`.
    """
    busiest = float(figures.busiest(figures.plan.counts).mean())
    survives = ", ".join(f"{1 - share:.3f}" for share in option.fatal[1:4])
    return (
        f"even work counts for more: the placement that survives most ({survives}, ... of 1, 2, ... lost nodes) has a "
        f"busiest node with {option.busiest:.3f} times the mean, this one {busiest:.3f}; --balance-weight 0 takes it"
    )


def _front(front: list[Option], weights: FloatArray) -> list[str]:
    """Return a table of the placements between survival and balance, and which weights of balance choose each.

    Args:
        weights: by number of lost nodes.
    """
    most_lost = min(front[0].fatal.size - 1, _MOST_LOST)
    lost = "".join(f"{number:8d}" for number in range(1, most_lost + 1))
    rows = [
        "survival against balance (recovery at least this much, by number of lost nodes):",
        f"  {'':15s} busiest{lost}  chosen by --balance-weight",
    ]
    for option, reach in zip(front, choice_weight_ranges(front, weights), strict=True):
        cells = "".join(f"{1 - share:8.4f}" for share in option.fatal[1 : most_lost + 1])
        chosen = "none" if reach is None else f"{reach[0]:.3g} to {'any' if reach[1] is None else f'{reach[1]:.3g}'}"
        rows.append(f"  {option.name:15s} {option.busiest:7.3f}{cells}  {chosen}")
    return rows


def _table(curves: dict[str, RecoveryCurve]) -> list[str]:
    """Return a table of the probabilities of survival, with one row per number of lost nodes, until all are 0.

    A note follows if a curve is not exact.
    """
    rows = ["  lost  " + "  ".join(f"{name:>8}" for name in curves)]
    longest = max(int(np.flatnonzero(curve.probability)[-1]) for curve in curves.values())
    for lost in range(1, min(longest + 2, next(iter(curves.values())).probability.size)):
        cells = [_cell(curve, lost) for curve in curves.values()]
        rows.append(f"  {lost:4d}  " + "  ".join(cells))
    if not all(curve.exact for curve in curves.values()):
        rows.append("  ~ sampled; half the width of its 95 % confidence interval is below 0.01")
    return rows


def _cell(curve: RecoveryCurve, lost: int) -> str:
    sampled = curve.low[lost] != curve.high[lost]
    return f"{'~' if sampled else ''}{curve.probability[lost]:.4f}".rjust(8)
