"""Searches for placements, in a process of their own: they may take all of a core, and the coordinator none of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.control.aside import Aside, answer_in_this_process
from holdfast.coordination.experts.searching import PlacementAnswer, PlacementSearch
from holdfast.coordination.inputs import Planned


def searcher(answer: Callable[[Planned], None]) -> Aside[PlacementSearch, PlacementAnswer]:
    """Return who makes one search at a time.

    Args:
        answer: called with what comes of a search, unless another one was begun meanwhile.
    """
    return Aside(
        __name__,
        PlacementAnswer | None,
        lambda search, found: answer(Planned(search.generation, found)),
        what="the search for a placement of the experts",
        within_s=lambda search: search.within_s,
        log=logging.getLogger("holdfast.coordinator"),
    )


def main() -> None:
    """Make the search on standard input, in a process of its own."""
    answer_in_this_process(PlacementSearch, PlacementSearch.solve)
