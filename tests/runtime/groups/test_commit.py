"""The commit operation: exact counts, the same bits on every rank, sums in rank order."""

import math
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.commit import Commit, Flag
from holdfast.runtime.groups.commit import finish, start_commit
from holdfast.runtime.groups.communicator import HaltedError, LocalCommunicator
from holdfast.testing.local_world import Seat, run_world

COUNTS = st.integers(0, 2**53)


@given(st.floats(allow_nan=False), st.floats(allow_nan=False), COUNTS, COUNTS, st.sampled_from([(), (Flag.SWAP,)]))
def test_a_world_of_one_gets_back_what_it_gave(
    square: float, loss: float, samples: int, nonfinite: int, flags: tuple[Flag, ...]
):
    part = Commit(grad_square=square, loss_sum=loss, samples=samples, nonfinite=nonfinite, flags=flags)
    v = finish(start_commit(LocalCommunicator(), part))
    assert v == part
    assert type(v.samples) is int


# Chosen so that every order of adding gives another last bit.
SQUARES = [0.1, 1e16, -1e16, 0.3]
LOSSES = [1 / 3, 1e-30, 7.7e10, -7.7e10]


def commit_body(seat: Seat) -> tuple[bytes, Commit, Commit]:
    communicator = seat.connect(1)
    part = Commit(
        grad_square=SQUARES[seat.rank],
        loss_sum=LOSSES[seat.rank],
        samples=2**51 + seat.rank,
        nonfinite=seat.rank,
        flags=(Flag.SWAP,),
    )
    v = finish(start_commit(communicator, part))
    part = Commit(
        grad_square=math.inf if seat.rank == 2 else 1.0,
        loss_sum=math.nan if seat.rank == 1 else 1.0,
        samples=0,
        nonfinite=int(seat.rank == 2),
        flags=() if seat.rank == 3 else (Flag.SWAP,),
    )
    bad = finish(start_commit(communicator, part))
    seat.meet()
    communicator.retire(sever=False)
    assert seat.graveyard.wait_empty(60)
    return struct.pack("=dd", v.grad_square, v.loss_sum), v, bad


def test_every_rank_gets_the_same_bits_added_in_rank_order():
    outcomes = run_world(4, commit_body)
    assert len({bits for bits, _, _ in outcomes}) == 1
    _, v, bad = outcomes[0]
    assert v.grad_square == ((0.0 + SQUARES[0]) + SQUARES[1] + SQUARES[2]) + SQUARES[3]
    assert v.loss_sum == ((0.0 + LOSSES[0]) + LOSSES[1] + LOSSES[2]) + LOSSES[3]
    assert (v.samples, v.nonfinite, v.flags) == (4 * 2**51 + 6, 6, (Flag.SWAP,))
    assert math.isinf(bad.grad_square)
    assert math.isnan(bad.loss_sum)
    assert bad.nonfinite == 1
    assert bad.flags == ()


def absent_body(seat: Seat) -> str:
    halt = threading.Event()
    communicator = seat.connect(1, halt=halt, timeout_s=5.0)
    outcome = "not ready"
    if seat.rank != 1:
        pending = start_commit(communicator, Commit(grad_square=0.0, loss_sum=0.0, samples=0, nonfinite=0))
        threading.Timer(0.005, halt.set).start()
        with pytest.raises(HaltedError) as caught:
            finish(pending)
        outcome = str(caught.value)
    seat.meet()
    communicator.retire()
    assert seat.graveyard.wait_empty(60)
    return outcome


def test_it_never_completes_unless_every_rank_has_issued_it():
    assert run_world(3, absent_body) == [
        "generation 1 was halted in commit",
        "not ready",
        "generation 1 was halted in commit",
    ]
