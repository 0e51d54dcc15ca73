"""A replica group forms its process groups without an agent: keys go from board to board."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from holdfast.errors import HoldfastError
from holdfast.protocol.layouts.layout import Layout
from holdfast.runtime.groups.rendezvous import Board
from holdfast.runtime.session.replica_group.groups import build_groups

CPU = torch.device("cpu")


def boards(places: int) -> list[Board]:
    made: list[Board] = []

    def to_others(mine: int) -> Callable[[dict[str, bytes]], None]:
        return lambda keys: [other.put(keys) for place, other in enumerate(made) if place != mine] and None

    made += [Board(0, to_others(place)) for place in range(places)]
    return made


def test_a_rank_that_does_not_join_the_group_setup_is_named() -> None:
    with pytest.raises(HoldfastError, match=r"rank 1 of this replica group hangs: .* within 0.1 s"):
        build_groups(boards(2)[0], Layout(shard=2), 0, CPU, timeout_s=0.1)


def test_a_rank_that_disappears_during_group_setup_is_named() -> None:
    first, second = boards(2)
    second.post("1:here", b"")
    with pytest.raises(HoldfastError, match=r"rank 0 of a replica group cannot reach rank 1 of it: .*did not come"):
        build_groups(first, Layout(shard=2), 0, CPU, timeout_s=0.1)


def test_group_setup_fails_if_the_agent_is_gone() -> None:
    board = boards(2)[0]
    threading.Timer(0.05, board.close).start()
    with pytest.raises(HoldfastError, match="the agent is gone"):
        build_groups(board, Layout(shard=2), 0, CPU)
