"""The groups of a unit, one along each dimension of its layout: they last as long as it, and are never built again."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from holdfast.errors import HoldfastError
from holdfast.protocol.job_spec import AUTO, Backend
from holdfast.protocol.layouts.layout import DIMENSIONS, Layout
from holdfast.protocol.names import key_of
from holdfast.runtime.groups.choose import build_communicator
from holdfast.runtime.groups.communicator import Communicator, HaltedError, PeerLostError
from holdfast.runtime.groups.graveyard import GroupReaper
from holdfast.runtime.groups.rendezvous import Board

#: a place that does not meet the others within this time hangs
BUILD_S = 60.0
_HERE = "127.0.0.1"
_HELLO = "here"


def build_groups(
    board: Board,
    layout: Layout,
    place: int,
    device: torch.device,
    *,
    backend: Backend = AUTO,
    timeout_s: float = BUILD_S,
) -> Mapping[str, Communicator]:
    """Build the groups of a place, together with the others of its unit; those of one place alone are left out.

    Returns:
        By the dimension's name.

    Raises:
        HoldfastError: a place did not come; the message names it.
    """
    deadline = time.monotonic() + timeout_s
    board.post(key_of(place, _HELLO), b"")
    _await_all_ranks(board, layout.places, timeout_s)
    built: dict[str, Communicator] = {}
    reaper = GroupReaper()
    for dimension in DIMENSIONS:
        members = layout.ranks_along(place, dimension)
        if len(members) == 1:
            continue
        try:
            built[dimension] = build_communicator(
                device,
                board,
                place,
                [_HERE] * len(members),
                members=members,
                name=f"{dimension}-{members[0]}/",
                generation=0,
                reaper=reaper,
                backend=backend,
                host=_HERE,
                build_timeout_s=max(deadline - time.monotonic(), 1.0),
                flat_up_to=len(members),
            )
        except (PeerLostError, HaltedError) as error:
            who = ", ".join(str(one) for one in members if one != place)
            raise HoldfastError(f"place {place} of a unit cannot reach place {who} of it: {error}") from None
    return built


def _await_all_ranks(board: Board, places: int, timeout_s: float) -> None:
    """Wait until all places are there to build groups."""
    keys = [key_of(place, _HELLO) for place in range(places)]
    try:
        board.wait(keys, timeout_s)
    except TimeoutError:
        there = board.values()
        missing = ", ".join(str(place) for place, key in enumerate(keys) if key not in there)
        raise HoldfastError(
            f"place {missing} of this unit hangs: it did not begin to build the unit's groups within {timeout_s:g} s"
        ) from None
    except HaltedError:
        raise HoldfastError("the agent is gone, through which a unit's places meet") from None
