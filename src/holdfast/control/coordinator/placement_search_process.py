"""Searches for placements in a separate process: a search may use a whole core, but not the coordinator's."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.control.separate_process import BackgroundSolver, answer_in_this_process
from holdfast.coordination.experts.searching import PlacementAnswer, PlacementSearch
from holdfast.coordination.inputs import Planned


def make_searcher(answer: Callable[[Planned], None]) -> BackgroundSolver[PlacementSearch, PlacementAnswer]:
    """Return a runner that makes one search at a time.

    Args:
        answer: called with the result of a search, unless another search was started meanwhile.
    """
    return BackgroundSolver(
        __name__,
        PlacementAnswer | None,
        lambda search, found: answer(Planned(search.generation, found)),
        what="the search for a placement of the experts",
        within_s=lambda search: search.within_s,
        log=logging.getLogger("holdfast.coordinator"),
    )


def main() -> None:
    """Make the search on standard input, as a separate process."""
    answer_in_this_process(PlacementSearch, PlacementSearch.solve)
