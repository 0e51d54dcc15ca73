"""The texts that explain to a worker why its replica group was refused."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.layout_list import Layouts, describe_layouts

CALLED_TWICE = "holdfast.init() was called twice: a process belongs to one replica group, with one layout"


def describe_misfit(layout: Layout, workers: int) -> str:
    """Return why a node with this many workers cannot be divided into replica groups of this layout, and what to do, or
    "" if it can.
    """
    places = layout.places
    if workers % places == 0:
        return ""
    takes = f"{layout} takes {places} workers per node"
    less = f", or a layout of {workers}" if workers > 1 else ""
    return (
        f"{takes}, or a multiple of that, and this job has {workers}: give --workers-per-node "
        f"{-(-workers // places) * places}{less}"
    )


def describe_difference(index: int, layout: Layout, others: Mapping[int, Layout]) -> str:
    """Return the message that another worker of the node requests another layout than this one, or "" if all are equal.

    Args:
        others: The layouts of the other workers by index on the node. The lowest that differs is named.
    """
    other = next((known for known in sorted(others) if others[known] != layout), None)
    if other is None:
        return ""
    return (
        f"worker {index} of this node asks for {_layout_text(layout)}, worker {other} for "
        f"{_layout_text(others[other])}: all must call holdfast.init() with the same layout"
    )


def describe_other_lists(index: int, layouts: Layouts, other: int, others: Layouts) -> str:
    """Return the message that two workers of a node list different layouts."""
    mine, theirs = (describe_layouts(listed) or "one layout" for listed in (layouts, others))
    return (
        f"worker {index} of this node lists {mine}, worker {other} {theirs}: "
        "all must call holdfast.init() with the same layouts"
    )


def _layout_text(layout: Layout) -> str:
    return "no layout" if layout == WHOLE else str(layout)
