"""The layouts that a script gives: one, or several, of which one is in force at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from holdfast.errors import BadInputError
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.layouts.layout_list import MAX_LAYOUTS, Layouts, ListedLayout, join_layout_names

#: the largest number of nodes that a layout can be given for; no job has more
MOST_NODES = 1_000_000
#: one layout; several in order of preference; or a dict from the least number of nodes to the layout
GivenLayout = Layout | Sequence[Layout] | Mapping[int, Layout]


def parse_layouts(given: GivenLayout | None) -> tuple[Layout | None, Layouts]:
    """Check the layouts of a script. Return (the layout, ()) if all are equal, else (None, all layouts).

    Without a layout, the result is (None, ()).

    Raises:
        BadInputError: a value is not a layout, a layout is given twice, there are none or too many, a dict has no
            layout for 1 node, or a layout has pipeline stages.
    """
    if given is None:
        return None, ()
    if isinstance(given, Layout):
        return _check_layout(given, given), ()
    if isinstance(given, Mapping):
        found = _parse_by_nodes(cast("Mapping[object, object]", given))
    elif isinstance(cast(object, given), list | tuple) and (not given or any(type(one) is Layout for one in given)):
        found = tuple(ListedLayout(layout=_check_layout(one, given)) for one in cast("Sequence[object]", given))
    else:
        raise BadInputError(
            f"holdfast.init(layout={given!r}) is a {type(given).__name__}: give holdfast.Layout(shard=N), a list of "
            "layouts in order of preference, or a dict from numbers of nodes to layouts"
        )
    if not found:
        raise BadInputError(f"holdfast.init(layout={given!r}) is empty: give at least one layout")
    if len(found) > MAX_LAYOUTS:
        raise BadInputError(f"holdfast.init() got {len(found)} layouts: give at most {MAX_LAYOUTS}")
    layouts = [one.layout for one in found]
    if not isinstance(given, Mapping) and len(set(layouts)) < len(layouts):
        raise BadInputError(f"holdfast.init() got a layout twice ({join_layout_names(layouts)}): give each once")
    return (layouts[0], ()) if len(set(layouts)) == 1 else (None, found)


def check_micro_batch(layouts: Layouts, micro_batch: int) -> None:
    """Check that a micro-batch can be split under all layouts of a job.

    Raises:
        BadInputError: it cannot be split under one of them.
    """
    for one in layouts:
        if micro_batch % one.layout.shard:
            raise BadInputError(
                f"a micro-batch of {micro_batch} samples cannot be split evenly over {one.layout}, which "
                f"holdfast.init() lists: give a micro_batch that is a multiple of {one.layout.shard}"
            )


def _parse_by_nodes(given: Mapping[object, object]) -> Layouts:
    """Return the layouts of a dict from the least number of nodes to the layout, by ascending number.

    Raises:
        BadInputError: a key is not a number of nodes, a value is not a layout, or the key 1 is missing.
    """
    for nodes in given:
        if type(nodes) is not int or not 1 <= nodes <= MOST_NODES:
            raise BadInputError(
                f"holdfast.init(layout=...) has the key {nodes!r}: give whole numbers of nodes from 1 to {MOST_NODES}, "
                "such as {1: Layout(shard=4), 3: Layout(shard=2)}"
            )
    if given and 1 not in given:
        fewest = min(cast("Mapping[int, object]", given))
        raise BadInputError(
            f"holdfast.init(layout=...) has no layout for fewer than {fewest} nodes, and a job may lose all but "
            "one: give an entry for 1"
        )
    pairs = sorted(cast("Mapping[int, object]", given).items())
    return tuple(ListedLayout(layout=_check_layout(one, given), nodes=nodes) for nodes, one in pairs)


def _check_layout(one: object, given: object) -> Layout:
    """Return `one` if it is a layout without pipeline stages; `given` is the whole argument, for error messages.

    Raises:
        BadInputError: it is not.
    """
    if not isinstance(one, Layout):
        raise BadInputError(
            f"holdfast.init(layout={given!r}) contains a {type(one).__name__}: give holdfast.Layout(shard=N)"
        )
    if one.stages > 1:
        raise BadInputError(f"holdfast.init(layout={given!r}): pipeline stages cannot be trained yet; use stages=1")
    return one
