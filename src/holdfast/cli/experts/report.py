"""What `holdfast experts plan` prints: a table for people, JSON for programs."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.planning import Plan, RecoveryCurve, node_lists, rack_curve, recovery_curve

_Racks = np.ndarray[Any, np.dtype[np.int64]]


def as_json(plan: Plan, racks: _Racks | None) -> dict[str, Any]:
    """Return the plan as JSON: layers, recovery, fault_threshold; and, where they apply, what else there is to say."""
    curves = [recovery_curve(counts) for counts in plan.counts]
    model = recovery_curve(plan.counts)
    recovery: dict[str, Any] = {"model": _by_lost(model), "layers": [_by_lost(curve) for curve in curves]}
    if not model.exact:
        recovery["model_95_percent"] = {
            str(lost): [float(model.low[lost]), float(model.high[lost])] for lost in range(1, model.low.size)
        }
    if racks is not None:
        recovery["racks"] = _by_lost(rack_curve(plan.counts, racks))
    threshold = plan.fault_threshold
    result: dict[str, Any] = {
        "layers": [
            {"replicas": replicas.tolist(), "nodes": node_lists(counts)}
            for replicas, counts in zip(plan.replicas, plan.counts, strict=True)
        ],
        "recovery": recovery,
        "fault_threshold": {"asked": threshold.asked, "given": threshold.given},
    }
    if plan.uniform_layers:
        result["uniform_layers"] = list(plan.uniform_layers)
    return result


def _by_lost(curve: RecoveryCurve) -> dict[str, float]:
    return {str(lost): float(value) for lost, value in enumerate(curve.probability) if lost}


def as_text(plan: Plan, name: str, curves: dict[str, RecoveryCurve], racks: _Racks | None) -> str:
    """Return the plan for people: what was planned, what had to be changed, recovery of all strategies, nodes."""
    layers, experts, nodes = plan.counts.shape
    slots = sorted(set(plan.slots.tolist()))
    per_node = str(slots[0]) if len(slots) == 1 else f"{slots[0]} to {slots[-1]}"
    threshold = plan.fault_threshold
    lines = [
        f"{experts} experts in {layers} layers on {nodes} nodes with {per_node} slots, placed by {name}",
        f"fault threshold: asked {threshold.asked}, given {threshold.given}",
    ]
    if threshold.given < threshold.asked:
        lines.append("  lowered: that many distinct nodes do not fit every expert (or the strategy keeps no guarantee)")
    if plan.uniform_layers:
        lines.append(f"  without load, planned as uniform: layers {', '.join(map(str, plan.uniform_layers))}")
    lines += ["", "probability that the whole model survives, by number of lost nodes:", *_table(curves)]
    if racks is not None:
        lines += ["", "the same, by number of lost racks:", *_table({name: rack_curve(plan.counts, racks)})]
    lines += ["", "experts on each node, layer 0:"]
    lines += [f"  node {node}: {' '.join(map(str, held))}" for node, held in enumerate(node_lists(plan.counts[0]))]
    return "\n".join(lines)


def _table(curves: dict[str, RecoveryCurve]) -> list[str]:
    """Return the curves side by side, down to where all are 0."""
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
