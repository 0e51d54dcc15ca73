"""Bytes of every rank reach every rank, complete and in rank order, on any number of levels."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_world import run_threads

from holdfast.planning.levels import FAN_OUT, FLAT_UP_TO
from holdfast.runtime.groups import gathering
from holdfast.runtime.groups.communicator import Communicator, HaltedError, LocalCommunicator
from holdfast.runtime.groups.gathering import gather_bytes
from tests.harness.local_world import Seat, run_world

NODES = st.lists(st.integers(0, 6), min_size=1, max_size=20).map(lambda draws: [f"n{draw}" for draw in draws])


def given_by(rank: int, seed: int) -> bytes:
    """Return bytes of any length; every third rank gives none."""
    rng = Random(seed * 101 + rank)
    return rng.randbytes(rng.choice((0, 1, 17, 300)))


@settings(max_examples=40, deadline=None)
@given(nodes=NODES, seed=st.integers(0, 1000), fan_out=st.sampled_from([2, 3, FAN_OUT]))
def test_every_rank_gathers_the_bytes_of_all_ranks(nodes: list[str], seed: int, fan_out: int) -> None:
    def body(comm: Communicator) -> list[bytes]:
        return gather_bytes(comm, given_by(comm.rank, seed), "notes")

    expected = [given_by(rank, seed) for rank in range(len(nodes))]
    for flat_up_to in (1, FLAT_UP_TO):
        found = run_threads(nodes, body, seed=seed, flat_up_to=flat_up_to, fan_out=fan_out)
        assert found == [expected] * len(nodes)


def test_a_single_rank_gathers_its_own_bytes() -> None:
    assert gather_bytes(LocalCommunicator(), b"abc", "notes") == [b"abc"]
    assert gather_bytes(LocalCommunicator(), b"", "notes") == [b""]


def gather_over_gloo(seat: Seat) -> list[list[bytes]]:
    flat = seat.connect(1)
    levels = seat.connect(2, any_to_any=False, flat_up_to=1, fan_out=2, nodes=["a", "b", "a"])
    return [gather_bytes(comm, given_by(seat.rank, 5), "notes") for comm in (flat, levels)]


def test_bytes_are_gathered_over_gloo() -> None:
    expected = [given_by(rank, 5) for rank in range(3)]
    assert run_world(3, gather_over_gloo) == [[expected, expected]] * 3


def test_a_halted_rank_leaves_the_gathering() -> None:
    def body(comm: Communicator) -> str:
        if comm.rank == 2:
            return "never came"
        with pytest.raises(HaltedError):
            gather_bytes(comm, b"x", "notes")
        return "left"

    halts = {0: lambda: True, 1: lambda: True}
    assert run_threads(["a", "b", "c"], body, seed=1, flat_up_to=8, fan_out=3, halts=halts) == [
        "left",
        "left",
        "never came",
    ]


def test_gathering_more_than_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "MAX_GATHERED_BYTES", 100)

    def body(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="together more than the limit of 100"):
            gather_bytes(comm, b"x" * 60, "notes")

    run_threads(["a", "b"], body, seed=1, flat_up_to=8, fan_out=3)
