"""The raw process groups of a unit: they last as long as it, and so are never halted, retired or built again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from holdfast.errors import HoldfastError
from holdfast.protocol.layout import Layout
from holdfast.protocol.names import key_of
from holdfast.runtime.groups.communicator import HaltedError
from holdfast.runtime.groups.rendezvous import Board, BoardStore
from holdfast.runtime.groups.transports.gloo import make_gloo
from holdfast.runtime.groups.transports.nccl import make_nccl

#: what the group of all places is called; the others are called as the layout's dimensions are
WHOLE_UNIT = "unit"
#: a place that does not meet the others within this time hangs
BUILD_S = 60.0
#: of an operation on them: whoever waits in one for a place that is gone is killed with it, and whoever waits for one
#: that computes or recovers goes on waiting
OPERATION_S = 1800.0
_HERE = "127.0.0.1"
_HELLO = "here"


def members_of(layout: Layout, place: int) -> dict[str, tuple[int, ...]]:
    """Return the groups that a place is in, by name, each with its members by place; none of one place alone."""
    places = range(layout.places)
    along = {
        WHOLE_UNIT: tuple(places),
        "shard": tuple(one for one in places if layout.tensor_of(one) == layout.tensor_of(place)),
        "tensor": tuple(one for one in places if layout.shard_of(one) == layout.shard_of(place)),
    }
    return {name: members for name, members in along.items() if len(members) > 1}


def build_groups(
    board: Board, layout: Layout, place: int, device: torch.device, *, timeout_s: float = BUILD_S
) -> Mapping[str, Any]:
    """Build the groups of a place, together with the others of its unit; returns them by name.

    Raises:
        HoldfastError: a place did not come; the message names it.
    """
    deadline = time.monotonic() + timeout_s
    board.post(key_of(place, _HELLO), b"")
    _await(board, layout.places, timeout_s)
    built: dict[str, Any] = {}
    for name, members in members_of(layout, place).items():
        left_s = max(deadline - time.monotonic(), 1.0)
        group = _build(board, name, members, place, device, left_s)
        if isinstance(group, str):
            who = ", ".join(str(one) for one in members if one != place)
            raise HoldfastError(f"place {place} of a unit cannot reach place {who} of it: {group}")
        built[name] = group
    return built


def _await(board: Board, places: int, timeout_s: float) -> None:
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


def _build(board: Board, name: str, members: Sequence[int], place: int, device: torch.device, timeout_s: float) -> Any:
    """Return one group, or the words of its failure."""
    nccl = device.type == "cuda"

    def owner(key: str) -> int:
        return members[0] if nccl else members[int(key.rpartition("/")[2])]  # (gloo's keys end with the setter's rank)

    store = BoardStore(board, timeout_s=timeout_s, rank=place, owner=owner, name=f"{name}/")
    rank, size = members.index(place), len(members)
    if nccl:
        try:
            return make_nccl(store, rank, size, device, OPERATION_S)
        except (RuntimeError, TimeoutError) as error:
            return str(error).split("\n", 1)[0][:512] or "failed"
    group = make_gloo(store, rank, size, _HERE, timeout_s)
    if isinstance(group, str):
        return group
    group._set_default_timeout(timedelta(seconds=OPERATION_S))
    try:
        group.allreduce([torch.zeros(1)]).wait(timedelta(seconds=timeout_s))  # (the first operation is slow)
    except RuntimeError as error:
        return str(error).split("\n", 1)[0][:512] or "failed"
    return group
