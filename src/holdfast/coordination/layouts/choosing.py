"""Chooses one of a job's layouts for a number of nodes.

If the script assigns layouts to numbers of nodes, that decides. Otherwise it is the layout under which a step is
shortest for the busiest replica group: its number of micro-batches times the seconds of one, measured under that layout
or estimated from another.

Pure: the same numbers give the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from holdfast.planning.waf.pace import micro_batch_share
from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.layout_list import (
    MAX_LAYOUTS,
    Layouts,
    ListedLayout,
    describe_layout,
    have_node_counts,
    layout_for,
)
from holdfast.protocol.record import Record

#: Relative gain below which a layout does not count as faster: measurements vary, and estimates vary more.
MIN_GAIN = 0.05
#: seconds for which the number of nodes is assumed to stay the same
HORIZON_S = 600.0
#: a change must save this many times its cost
GAIN_PER_COST = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChoice:
    """The layout that a job should have."""

    layout: Layout
    #: the reason, in words
    why: str = field(compare=False)
    #: seconds that a change to it saves within the horizon
    gain_s: float = math.inf
    #: whether the script decides
    by_script: bool = False

    def is_worth(self, costs_s: float) -> bool:
        """Return whether the change is worth its cost in seconds."""
        return self.by_script or self.gain_s > GAIN_PER_COST * costs_s


def choose_layout(
    layouts: Layouts,
    in_force: Layout,
    *,
    nodes: int,
    workers: int,
    micro_batches: int,
    measured_s: Mapping[str, float],
    too_large: Collection[Layout] = (),
    failed: Collection[Layout] = (),
) -> LayoutChoice:
    """Return the layout that a job should have, with the reason.

    If the script gives layouts by numbers of nodes, these decide. Otherwise it is the layout with the shortest step,
    measured or estimated, if it is faster than the current one by at least `MIN_GAIN`; else the current one. Of equals,
    the first is chosen.

    Args:
        layouts: the job's layouts, in order of preference
        in_force: the current layout
        nodes: number of nodes
        workers: workers of a node
        micro_batches: micro-batches of a step
        measured_s: measured seconds of a micro-batch, by the names of layouts
        too_large: Layouts that did not fit into memory. If the current one is among them, another replaces it if there
            is one. Ignored if the script gives layouts by numbers of nodes.
        failed: Layouts under which the script fails. They are not chosen, but the current one may stay. If the script
            gives one of them for this number of nodes, the current layout stays.
    """
    if have_node_counts(layouts):
        layout = layout_for(layouts, nodes)
        if layout != in_force and layout in failed:
            return LayoutChoice(layout=in_force, why=f"{describe_layout(layout)} has failed", by_script=True)
        return LayoutChoice(layout=layout, why=f"the script says so for {_format_nodes(nodes)}", by_script=True)
    without = {*too_large, *(layout for layout in failed if layout != in_force)}
    known = [one.layout for one in layouts if one.layout not in without]
    fitting = known or [in_force]
    steps = {one: _estimate_step_s(one, nodes * workers, micro_batches, measured_s) for one in dict.fromkeys(fitting)}
    best = min(steps, key=lambda one: steps[one])
    if in_force not in steps:
        why = (
            f"{describe_layout(in_force)} has not fitted memory: of the other layouts a step is shortest under "
            f"{describe_layout(best)}"
        )
        return LayoutChoice(layout=best, why=why, by_script=True)
    gain = 1.0 - steps[best] / steps[in_force]
    if gain < MIN_GAIN:
        why = f"with {_format_nodes(nodes)} no other layout is faster by {MIN_GAIN:.0%}"
        return LayoutChoice(layout=in_force, why=why, gain_s=0.0)
    by = "as measured" if str(best) in measured_s else "as estimated"
    why = (
        f"with {_format_nodes(nodes)} a step takes {steps[best] / steps[in_force]:.2f} times as long under "
        f"{describe_layout(best)} as under {describe_layout(in_force)}, {by}"
    )
    return LayoutChoice(layout=best, why=why, gain_s=HORIZON_S * gain)


def layouts_by_nodes(record: Record, *, nodes: int, workers: int) -> Layouts:
    """Return the layouts that the job would choose for 1 to `nodes` nodes, each with the number of nodes from which it
    applies.

    Returns () if every worker always has the whole model. If the layout changes too often, only the first changes are
    returned.

    Args:
        workers: workers of a node
    """
    if not record.layouts:
        return () if record.layout == WHOLE else (ListedLayout(layout=record.layout, nodes=1),)
    found: list[ListedLayout] = []
    for count in range(1, nodes + 1):
        layout = choose_layout(
            record.layouts,
            record.layout,
            nodes=count,
            workers=workers,
            micro_batches=record.micro_batches,
            measured_s=record.layout_s,
            too_large=record.too_large,
            failed=[one.layout for one in record.failed_layouts],
        ).layout
        if not found or found[-1].layout != layout:
            found.append(ListedLayout(layout=layout, nodes=count))
    return () if all(one.layout == WHOLE for one in found) else tuple(found[:MAX_LAYOUTS])


def _estimate_step_s(layout: Layout, workers: int, micro_batches: int, measured_s: Mapping[str, float]) -> float:
    """Return the estimated seconds of a step: a micro-batch's, times the micro-batches of the busiest replica group.

    Without any measurement, in an arbitrary unit.

    Args:
        workers: all workers of the job
    """
    units = max(1, workers // layout.places)
    return -(-max(1, micro_batches) // units) * _estimate_micro_batch_s(layout, measured_s)


def _estimate_micro_batch_s(layout: Layout, measured_s: Mapping[str, float]) -> float:
    """Return the measured seconds of a micro-batch, or an estimate from the newest measurement of another layout,
    scaled by the numbers of workers in the replica groups.

    Without any measurement, the estimate is in an arbitrary unit.
    """
    if (known := measured_s.get(str(layout))) is not None:
        return known
    # The newest measurement of another layout gives the speed of the machines.
    scale = 1.0
    for name, seconds in measured_s.items():
        scale = seconds / micro_batch_share(_count_places(name))
    return scale * micro_batch_share(layout.places)


def _count_places(name: str) -> int:
    """Return the number of workers in a replica group, from the sizes in a layout's name."""
    sizes = [int(word) for word in name.split() if word.isdecimal()]
    return math.prod(sizes)


def _format_nodes(count: int) -> str:
    """Return a number of nodes as text."""
    return "one node" if count == 1 else f"{count} nodes"
