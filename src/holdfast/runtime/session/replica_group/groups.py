"""The groups of a replica group, one along each dimension of its layout. They live as long as the replica group."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from holdfast.errors import HoldfastError
from holdfast.protocol.job_spec import AUTO, Backend
from holdfast.protocol.layouts.layout import DIMENSIONS, Layout
from holdfast.protocol.names import key_of
from holdfast.runtime.groups.abandoned_groups import GroupReaper
from holdfast.runtime.groups.communicator import Communicator, HaltedError, PeerLostError
from holdfast.runtime.groups.rendezvous import Board
from holdfast.runtime.groups.transport_choice import build_communicator

#: a rank that has not met the others after this many seconds counts as hung
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
    """Build the groups of a local rank, together with the other ranks of its replica group. Waits for them first.

    Args:
        board: the rendezvous of the replica group.
        place: the local rank.
        timeout_s: for waiting and building in total, in seconds.

    Returns:
        The groups, by the name of the dimension. Groups of one rank are left out.

    Raises:
        HoldfastError: a rank did not join; the message names it.
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
            raise HoldfastError(f"rank {place} of a replica group cannot reach rank {who} of it: {error}") from None
    return built


def _await_all_ranks(board: Board, places: int, timeout_s: float) -> None:
    """Wait until all ranks have posted that they are ready to build groups.

    Args:
        places: number of ranks.

    Raises:
        HoldfastError: ranks did not post in time, and are named; or the agent is gone.
    """
    keys = [key_of(place, _HELLO) for place in range(places)]
    try:
        board.wait(keys, timeout_s)
    except TimeoutError:
        arrived = board.values()
        missing = ", ".join(str(place) for place, key in enumerate(keys) if key not in arrived)
        raise HoldfastError(
            f"rank {missing} of this replica group hangs: it did not start to build its groups within {timeout_s:g} s"
        ) from None
    except HaltedError:
        raise HoldfastError("the agent is gone, so the ranks of a replica group cannot meet") from None
