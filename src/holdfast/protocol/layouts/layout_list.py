"""Jobs with several layouts, of which one is in force: the list, and changes between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.names import Blob, Count, Struct, Text
from holdfast.protocol.state import SnapshotKey

#: most layouts of a job
MAX_LAYOUTS = 16


class ListedLayout(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A layout that a job may use."""

    layout: Layout
    #: least number of nodes for it, as the script gives it; 0: holdfast chooses
    nodes: Count = 0


#: The layouts of a job, in order of preference or of their node counts. () if the job has only one layout.
Layouts = Annotated[tuple[ListedLayout, ...], Meta(max_length=MAX_LAYOUTS)]


class LayoutChange(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="LayoutChange"):
    """A change of the layout that is in progress."""

    before: Layout
    after: Layout
    why: Text
    #: number of nodes that led to it
    nodes: Count
    #: when it began, unix seconds
    since: float
    #: The stashed state, once all members have stashed it and `after` is in force; None before that.
    kept: SnapshotKey | None = None
    #: the experts that each member has stashed
    experts: tuple[Blob, ...] = ()


class FailedLayout(Struct, frozen=True, kw_only=True, tag="FailedLayout"):
    """A layout under which the script failed before a step was committed."""

    layout: Layout
    #: it is not tried again before this time, unix seconds
    until: float
    #: failures in a row
    tries: int = 1


def have_node_counts(layouts: Layouts) -> bool:
    """Return whether the script gives a node count for each layout."""
    return any(one.nodes for one in layouts)


def layout_for(layouts: Layouts, nodes: int) -> Layout:
    """Return the layout with which a job begins on this many nodes.

    If the layouts have node counts, it is the one with the largest count that is reached; else, or if none is, the
    first.
    """
    fitting = [one for one in layouts if one.nodes <= nodes] if have_node_counts(layouts) else []
    return max(fitting, key=lambda one: one.nodes).layout if fitting else layouts[0].layout


def places_by_nodes(layouts: Layouts) -> tuple[int, ...]:
    """Return the workers of a replica with 1, 2, ... nodes, up to the last change; () if there is only one layout."""
    most = max((one.nodes for one in layouts), default=0)
    return tuple(layout_for(layouts, nodes).places for nodes in range(1, most + 1))


def describe_layouts(layouts: Layouts) -> str:
    """Return the layouts of a job in words: each with the number of nodes from which it applies, if the script gives
    these; else as alternatives.
    """
    if have_node_counts(layouts):
        return ", ".join(f"{describe_layout(one.layout)} from {one.nodes} nodes on" for one in layouts)
    return " or ".join(describe_layout(one.layout) for one in layouts)


def describe_layout(layout: Layout) -> str:
    """Return a layout in words."""
    return "one place" if layout == WHOLE else str(layout)


def join_layout_names(layouts: Sequence[Layout]) -> str:
    """Return several layouts in words."""
    return ", ".join(map(describe_layout, layouts))
