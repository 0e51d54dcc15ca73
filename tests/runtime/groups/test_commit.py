"""The commit operation: flags that need all ranks, wishes that need one, and no result before all have issued it."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.protocol.commit import Commit, Flag, Wish
from holdfast.runtime.groups.commit import finish_commit, start_commit
from holdfast.runtime.groups.communicator import HaltedError, LocalCommunicator
from tests.harness.local_world import Seat, run_world

V = Commit(grad_square=1.0, loss_sum=2.0, samples=3, nonfinite=0)


@given(st.sampled_from([(), (Flag.SWAP,)]), st.sampled_from([(), (Wish.STOP,), (Wish.STOP, Wish.SAVE)]))
def test_a_single_rank_gets_its_own_flags_and_wishes(flags: tuple[Flag, ...], wishes: tuple[Wish, ...]):
    v = finish_commit(start_commit(LocalCommunicator(), flags, wishes), V)
    assert v == replace(V, flags=flags, wishes=wishes)


def commit_body(seat: Seat) -> tuple[Commit, Commit]:
    communicator = seat.connect(1)
    all_raise = finish_commit(start_commit(communicator, (Flag.SWAP,), (Wish.SAVE,) if seat.rank == 1 else ()), V)
    all_but_one = finish_commit(start_commit(communicator, () if seat.rank == 3 else (Flag.SWAP,)), V)
    seat.meet()
    communicator.retire(sever=False)
    assert seat.reaper.wait_empty(60)
    return all_raise, all_but_one


def test_flags_need_all_ranks_and_wishes_need_one_rank():
    for all_raise, all_but_one in run_world(4, commit_body):
        assert all_raise == replace(V, flags=(Flag.SWAP,), wishes=(Wish.SAVE,))
        assert all_but_one == V


def absent_body(seat: Seat) -> str:
    halt = threading.Event()
    communicator = seat.connect(1, halt=halt, timeout_s=5.0)
    outcome = "not ready"
    if seat.rank != 1:
        pending = start_commit(communicator)
        threading.Timer(0.005, halt.set).start()
        with pytest.raises(HaltedError) as caught:
            finish_commit(pending, V)
        outcome = str(caught.value)
    seat.meet()
    communicator.retire()
    assert seat.reaper.wait_empty(60)
    return outcome


def test_a_commit_completes_only_if_every_rank_has_issued_it():
    assert run_world(3, absent_body) == [
        "generation 1 was halted in commit",
        "not ready",
        "generation 1 was halted in commit",
    ]
