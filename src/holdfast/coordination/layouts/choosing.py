"""Which of the layouts that a job lists belongs to a number of nodes. Pure: the same numbers give the same answer.

Where the script says it, that is all. Else the one under which a step's busiest unit computes shortest: so many
micro-batches, each of which takes what was measured under that layout, or what is guessed from one that was.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from holdfast.planning.waf.pace import micro_batch_share
from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.several import (
    MAX_LAYOUTS,
    Layouts,
    ListedLayout,
    describe_layout,
    have_node_counts,
    layout_for,
)
from holdfast.protocol.record import Record

#: a layout that is not faster by so much is no faster: what is measured varies, and guesses more
LEAST_GAIN = 0.05
#: the number of nodes is expected to stay for so long, in seconds
HORIZON_S = 600.0
#: the change has to win so many times what it costs
WORTH = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChoice:
    """What a job is to have. `wins_s`: what a change to it wins within the horizon; `told`: the script says so."""

    layout: Layout
    why: str = field(compare=False)
    wins_s: float = math.inf
    told: bool = False

    def pays(self, costs_s: float) -> bool:
        """Tell whether a change to this is worth what it costs, in seconds."""
        return self.told or self.wins_s > WORTH * costs_s


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
    """Return which layout a job is to have.

    Args:
        layouts: those that it lists, in the order of preference. workers: of a node.
        measured_s: what a micro-batch took under some of them, by their names.
        too_large: those that have not fitted memory; one that is in force all the same is left where there is another.
        failed: those under which the script fails, told or not: what is in force stays.
    """
    if have_node_counts(layouts):
        layout = layout_for(layouts, nodes)
        if layout != in_force and layout in failed:
            return LayoutChoice(layout=in_force, why=f"{describe_layout(layout)} has failed", told=True)
        return LayoutChoice(layout=layout, why=f"the script says so for {_nodes(nodes)}", told=True)
    without = {*too_large, *(layout for layout in failed if layout != in_force)}
    known = [one.layout for one in layouts if one.layout not in without]
    fitting = known or [in_force]
    steps = {one: _step_s(one, nodes * workers, micro_batches, measured_s) for one in dict.fromkeys(fitting)}
    best = min(steps, key=lambda one: steps[one])
    if in_force not in steps:
        why = (
            f"{describe_layout(in_force)} has not fitted memory: of the others a step would take least under "
            f"{describe_layout(best)}"
        )
        return LayoutChoice(layout=best, why=why, told=True)
    gain = 1.0 - steps[best] / steps[in_force]
    if gain < LEAST_GAIN:
        why = f"with {_nodes(nodes)} no other layout is faster by {LEAST_GAIN:.0%}"
        return LayoutChoice(layout=in_force, why=why, wins_s=0.0)
    by = "as was measured" if str(best) in measured_s else "as is expected"
    why = (
        f"with {_nodes(nodes)} a step takes {steps[best] / steps[in_force]:.2f} times as long under "
        f"{describe_layout(best)} as under {describe_layout(in_force)}, {by}"
    )
    return LayoutChoice(layout=best, why=why, wins_s=HORIZON_S * gain)


def layouts_by_nodes(record: Record, *, nodes: int, workers: int) -> Layouts:
    """Return from how many nodes on, up to `nodes`, a job is to have which layout; () where that is always the whole.

    Of numbers between which it changes too often to be told, the first ones.
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


def _step_s(layout: Layout, workers: int, micro_batches: int, measured_s: Mapping[str, float]) -> float:
    """Return how long a step takes; where nothing was measured of any layout, in units of no matter what."""
    units = max(1, workers // layout.places)
    return -(-max(1, micro_batches) // units) * _micro_batch_s(layout, measured_s)


def _micro_batch_s(layout: Layout, measured_s: Mapping[str, float]) -> float:
    if (known := measured_s.get(str(layout))) is not None:
        return known
    # (what is known of others, of which the last was measured last, says how fast the machines are)
    scale = 1.0
    for name, seconds in measured_s.items():
        scale = seconds / micro_batch_share(_places_of(name))
    return scale * micro_batch_share(layout.places)


def _places_of(name: str) -> int:
    """Return how many places a layout of this name has."""
    sizes = [int(word) for word in name.split() if word.isdecimal()]
    return math.prod(sizes)


def _nodes(count: int) -> str:
    return "one node" if count == 1 else f"{count} nodes"
