"""`holdfast experts plan --compare eplb`: balance, survival and moves over a recording, and whether moving pays.

As in service, each placement is made from the loads of one window, and judged by the loads of the next.

Axes: T windows, L layers, E experts, R slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planner.placement import rebalance_experts
from holdfast.planning.arrays import FloatArray, IntArray, indices
from holdfast.planning.balance.eplb import EplbShape, eplb
from holdfast.planning.balance.work import busiest_over_mean
from holdfast.planning.survival.recovery_probability import recovery_curve

#: Windows that are looked at; more are added up.
_MOST_WINDOWS = 24
#: Lost nodes that are shown.
_MOST_LOST = 3
#: Slots that may change in a rebalance, of the policy with a budget: their share.
_BUDGET = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The slots of an inference engine."""

    nodes: int
    gpus_per_node: int
    slots_per_node: int
    groups: int
    fault_threshold: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def slots(self) -> int:
        return self.nodes * self.slots_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigures:
    """What a policy makes of a recording; means over the windows."""

    name: str
    #: The busiest GPU over the mean, by the loads of the plan's own window, and of the next.
    planned: float
    came: float
    #: Recovery probability by number of lost nodes 1, 2, ..., the least over the windows.
    survives: list[float]
    #: Copies per rebalance, over the slots; the most that one GPU gets in one.
    moved: float
    most_copies: float


def compare(windows: FloatArray, shape: EngineShape) -> list[PolicyFigures]:
    """Return the figures of each policy on loads `(T, L, E)`. If there is only one window, it counts as the next, too.

    More than `_MOST_WINDOWS` windows are merged first.

    Raises:
        BadInputError: the slots or groups do not fit.
    """
    if shape.gpus_per_node < 1 or shape.slots_per_node % shape.gpus_per_node:
        raise BadInputError(
            f"--gpus-per-node is {shape.gpus_per_node}: it must divide the {shape.slots_per_node} slots of a node"
        )
    if shape.groups < 1 or windows.shape[2] % shape.groups:
        raise BadInputError(f"--groups is {shape.groups}: it must divide the {windows.shape[2]} experts")
    windows = _merge_windows(windows)
    return [_figures(name, policy, windows, shape) for name, policy in _policies(shape).items()]


#: From the loads `(L, E)` and the expert in each slot before `(L, R)`, or None, to the one then.
_Policy = Callable[[FloatArray, IntArray | None], IntArray]


def _policies(shape: EngineShape) -> dict[str, _Policy]:
    """Return the compared policies by name: never moved, EPLB, and holdfast's with fault threshold 1 and the given one.

    A policy takes loads `(L, E)` and the previous experts by slot (None at first), and returns the expert in each slot
    `(L, slots)`. "2 %" limits the moves.
    """
    threshold, budget = shape.fault_threshold, round(_BUDGET * shape.slots)
    eplb_shape = EplbShape(replicas=shape.slots, groups=shape.groups, nodes=shape.nodes, gpus=shape.gpus)

    def ours(loads: FloatArray, held: IntArray | None, *, f: int, most: int | None = None) -> IntArray:
        """Return holdfast's expert in each slot, with fault threshold `f` and at most `most` moves per layer."""
        found: IntArray = rebalance_experts(
            loads,
            shape.slots,
            shape.groups,
            shape.nodes,
            shape.gpus,
            fault_threshold=f,
            old_indices=held,
            move_budget=None if held is None or most is None else most * len(loads),
        )[0]
        return found

    policies: dict[str, _Policy] = {
        "never moved": lambda loads, held: ours(loads, None, f=1) if held is None else held,
        "eplb": lambda loads, _: eplb(loads, eplb_shape),
        "holdfast, f = 1": lambda loads, held: ours(loads, held, f=1),
        "holdfast, f = 1, 2 %": lambda loads, held: ours(loads, held, f=1, most=budget),
    }
    if threshold > 1:
        policies[f"holdfast, f = {threshold}"] = lambda loads, held: ours(loads, held, f=threshold)
        policies[f"holdfast, f = {threshold}, 2 %"] = lambda loads, held: ours(loads, held, f=threshold, most=budget)
    return policies


def _merge_windows(windows: FloatArray) -> FloatArray:
    """Return `windows` `(T, L, E)`; if there are more than `_MOST_WINDOWS`, neighbours are added up."""
    if len(windows) <= _MOST_WINDOWS:
        return windows
    bounds = indices(_MOST_WINDOWS) * len(windows) // _MOST_WINDOWS
    return np.add.reduceat(windows, bounds, axis=0)


def _figures(name: str, policy: _Policy, windows: FloatArray, shape: EngineShape) -> PolicyFigures:
    """Run a policy over the windows, and return its figures: balance on its own and the next window, survival, moves.

    Survival by number of lost nodes is the worst over the windows.
    """
    held: IntArray | None = None
    planned: list[float] = []
    came: list[float] = []
    moved: list[int] = []
    most: list[int] = []
    survives: FloatArray = np.ones(_MOST_LOST)
    for number in range(max(len(windows) - 1, 1)):
        slots = policy(windows[number], held)
        counts = _counts(slots, windows.shape[2], shape.gpus)
        planned.append(float(busiest_over_mean(counts, windows[number]).mean()))
        came.append(float(busiest_over_mean(counts, windows[min(number + 1, len(windows) - 1)]).mean()))
        by_node = counts.reshape(*counts.shape[:2], shape.nodes, -1).sum(axis=3)
        curve = recovery_curve(by_node).probability[1 : _MOST_LOST + 1]
        survives[: curve.size] = np.minimum(survives[: curve.size], curve)
        if held is not None:
            copies = (counts > 0) & (_counts(held, windows.shape[2], shape.gpus) == 0)
            moved.append(int(copies.sum()))
            most.append(int(copies.sum(axis=(0, 1)).max()))
        held = slots
    return PolicyFigures(
        name=name,
        planned=float(np.mean(planned)),
        came=float(np.mean(came)),
        survives=survives[: min(shape.nodes, _MOST_LOST)].tolist(),
        moved=float(np.mean(moved)) / (shape.slots * windows.shape[1]) if moved else 0.0,
        most_copies=float(np.mean(most)) if most else 0.0,
    )


def _counts(slots: IntArray, experts: int, gpus: int) -> IntArray:
    """Return replicas `(L, E, GPUs)` from the expert in each slot `(L, R)`.

    Each of the `gpus` GPUs has R / `gpus` consecutive slots.
    """
    layers, number = slots.shape
    counts = np.zeros((layers, experts, gpus), dtype=np.int64)
    np.add.at(counts, (indices(layers)[:, None], slots, indices(number)[None, :] // (number // gpus)), 1)
    return counts


def comparison_as_json(found: list[PolicyFigures]) -> list[dict[str, Any]]:
    """Return the figures as JSON."""
    return [
        {
            "policy": figures.name,
            "busiest_gpu": {"planned": figures.planned, "came": figures.came},
            "survives": {str(lost): value for lost, value in enumerate(figures.survives, start=1)},
            "moved_share": figures.moved,
            "most_copies_of_a_gpu": figures.most_copies,
        }
        for figures in found
    ]


def comparison_as_text(found: list[PolicyFigures], windows: int) -> str:
    """Return the figures as a table. With several windows, add a verdict on each policy next to the first one."""
    lost = "".join(f"{number:8d}" for number in range(1, len(found[0].survives) + 1))
    lines = [
        "busiest GPU over the mean, by the loads of its own window and of the next; survival by number of lost nodes:",
        f"  {'':20s} planned    came{lost}  copies a rebalance",
    ]
    for figures in found:
        survives = "".join(f"{value:8.4f}" for value in figures.survives)
        lines.append(f"  {figures.name:20s} {figures.planned:7.3f} {figures.came:7.3f}{survives}  {figures.moved:.2%}")
    if windows > 1:
        lines += ["", *(_verdict(found[0], figures) for figures in found[1:])]
    return "\n".join(lines)


def _verdict(still: PolicyFigures, figures: PolicyFigures) -> str:
    """Return in words whether the moves of a policy pay, by the time that one copy may take.

    Args:
        still: the figures of the placement that is never moved.
        figures: the figures of the policy.
    """
    gain = still.came - figures.came
    if gain <= 0:
        return f"  {figures.name}: rebalancing does not pay: the next loads are as even without it"
    if not figures.most_copies:
        return f"  {figures.name}: rebalancing pays: it copies nothing"
    return (
        f"  {figures.name}: each step saves {gain:.3f} of what its experts take when even, and one GPU gets "
        f"{figures.most_copies:.0f} copies: it pays if one takes less than {gain / figures.most_copies:.2g} of that, "
        "times the steps to the next rebalance"
    )
