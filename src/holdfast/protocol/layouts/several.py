"""Several layouts of one job, of which one is in force: which ones it lists, and a change from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.names import Blob, Count, Struct, Text
from holdfast.protocol.state import SnapshotKey

#: that a job may list
MAX_LAYOUTS = 16


class ListedLayout(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A layout that a job may have. `nodes`: from so many nodes on, as the script says; 0: holdfast chooses."""

    layout: Layout
    nodes: Count = 0


#: all that a job may have, () where it has one alone: in the order of preference, or of the nodes that are told
Layouts = Annotated[tuple[ListedLayout, ...], Meta(max_length=MAX_LAYOUTS)]


class LayoutChange(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="LayoutChange"):
    """A change of layout that is under way, since when (unix seconds), because of how many nodes, and why.

    `kept`: all members have put that state into the memory of their nodes, and `after` is in force; None: not yet.
    `experts`: which ones each of those members has put away.
    """

    before: Layout
    after: Layout
    why: Text
    nodes: Count
    since: float
    kept: SnapshotKey | None = None
    experts: tuple[Blob, ...] = ()


class FailedLayout(Struct, frozen=True, kw_only=True, tag="FailedLayout"):
    """The script failed under it before a step was committed, `tries` times in a row; `until` then it is not tried."""

    layout: Layout
    until: float
    tries: int = 1


def are_told(layouts: Layouts) -> bool:
    """Tell whether the script says which layout belongs to how many nodes."""
    return any(one.nodes for one in layouts)


def layout_for(layouts: Layouts, nodes: int) -> Layout:
    """Return what a job with so many nodes begins with: what it is told for them, else the first that it lists."""
    fitting = [one for one in layouts if one.nodes <= nodes] if are_told(layouts) else []
    return max(fitting, key=lambda one: one.nodes).layout if fitting else layouts[0].layout


def places_by_nodes(layouts: Layouts) -> tuple[int, ...]:
    """Return how many places a replica has with 1, 2, ... nodes, until it is the same for all more; () for one."""
    most = max((one.nodes for one in layouts), default=0)
    return tuple(layout_for(layouts, nodes).places for nodes in range(1, most + 1))


def said_of(layouts: Layouts) -> str:
    """Return the layouts of a job in words."""
    if are_told(layouts):
        return ", ".join(f"{said_so(one.layout)} from {one.nodes} nodes on" for one in layouts)
    return " or ".join(said_so(one.layout) for one in layouts)


def said_so(layout: Layout) -> str:
    """Return a layout in words, as a part of a sentence."""
    return "one place" if layout == WHOLE else str(layout)


def names_of(layouts: Sequence[Layout]) -> str:
    """Return several layouts in words."""
    return ", ".join(map(said_so, layouts))
