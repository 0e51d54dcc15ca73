"""Hierarchical sums: determined by the plan alone, bit-identical everywhere, and never available too early."""

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from thread_world import run_threads
from torch import nn

from holdfast.planning.levels import Levels, compute_levels
from holdfast.protocol.commit import Commit, Flag
from holdfast.protocol.messages.orders import Inject
from holdfast.runtime.faults.dying_group import FaultingCommunicator
from holdfast.runtime.faults.orders import Faults, InjectedError
from holdfast.runtime.groups.commit import finish_commit, start_commit
from holdfast.runtime.groups.communicator import Communicator, HaltedError, PeerLostError
from holdfast.runtime.groups.hierarchical import build_hierarchical
from holdfast.runtime.groups.rendezvous import Board
from holdfast.runtime.groups.sums import finish_sums, start_sums
from holdfast.runtime.reduction.reduction import EMPTY_RESULT, GradientBuckets, reduce_gradients
from tests.harness.local_world import LocalWorld, Seat, run_world


def level_sums(nodes: Sequence[str], flat_up_to: int, fan_out: int, shares: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of all shares in the order of the levels, in the dtype of the shares."""
    levels = [compute_levels(nodes, rank, flat_up_to=flat_up_to, fan_out=fan_out) for rank in range(len(nodes))]
    known = list(shares)
    for number, owners in enumerate(levels[0].owners):
        sums = list(known)
        for rank, mine in enumerate(levels):
            if number < len(mine.groups) and mine.groups[number].index(rank) < owners:
                total = known[mine.groups[number][0]].clone()
                for other in mine.groups[number][1:]:
                    total += known[other]
                sums[rank] = total
        known = sums
    return known[0]


SHAPES = st.tuples(
    st.lists(st.integers(1, 3), min_size=2, max_size=6).map(
        lambda sizes: [f"n{node}" for node, size in enumerate(sizes) for _ in range(size)]
    ),
    st.integers(1, 4),
    st.integers(2, 4),
)


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.integers(0, 99))
def test_sums_follow_the_plan_whichever_rank_is_late(shape: tuple[list[str], int, int], seed: int):
    nodes, flat_up_to, fan_out = shape
    draws = torch.randn(len(nodes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).exp() * 1e6

    def body(comm: Communicator) -> tuple[list[float], Commit]:
        sums = finish_sums(start_sums(comm, draws[comm.rank].tolist(), "sums"))
        flags = () if comm.rank == seed % (2 * comm.size) else (Flag.SWAP,)
        return sums, finish_commit(start_commit(comm, flags), EMPTY_RESULT)

    outcomes = run_threads(nodes, body, seed=seed, flat_up_to=flat_up_to, fan_out=fan_out)
    expected = level_sums(nodes, flat_up_to, fan_out, list(draws))
    for sums, v in outcomes:
        assert sums == expected.tolist()
        assert v == outcomes[0][1]
    v = outcomes[0][1]
    assert v.flags == (() if seed % (2 * len(nodes)) < len(nodes) else (Flag.SWAP,))


def buckets_of(rank: int, dtype: torch.dtype, numel: int, bucket_bytes: int) -> GradientBuckets:
    generator = torch.Generator().manual_seed(rank)
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (numel, 7, 1)]
    buckets = GradientBuckets(parameters, bucket_bytes=bucket_bytes)
    for parameter in parameters[: 3 if rank else 2]:  # One rank does not touch one part.
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    buckets.collect()
    return buckets


@settings(max_examples=25, deadline=None)
@given(
    SHAPES,
    st.integers(0, 99),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(1, 400),
    st.sampled_from([64, 1 << 20]),
)
def test_gradients_follow_the_plan_whichever_rank_is_late(
    shape: tuple[list[str], int, int], seed: int, dtype: torch.dtype, numel: int, bucket_bytes: int
):
    nodes, flat_up_to, fan_out = shape

    def body(comm: Communicator) -> tuple[list[torch.Tensor], Commit]:
        buckets = buckets_of(comm.rank, dtype, numel, bucket_bytes)
        own = replace(EMPTY_RESULT, samples=2**40 + comm.rank, loss_sum=0.1 * comm.rank)
        for _ in range(2):  # The second run overwrites the buffers of the first.
            v = reduce_gradients([buckets], comm, 0.5, own=own)
        buckets.use_reduced()
        return [p.grad for p in buckets.parameters if p.grad is not None], v

    outcomes = run_threads(nodes, body, seed=seed, flat_up_to=flat_up_to, fan_out=fan_out)
    locals_ = [buckets_of(rank, dtype, numel, bucket_bytes).parameters for rank in range(len(nodes))]
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    square = 0.0
    for place in range(3):
        made = [parameters[place] for parameters in locals_]
        shares = [(p.grad if p.grad is not None else torch.zeros_like(p)).detach().to(wide) for p in made]
        expected = level_sums(nodes, flat_up_to, fan_out, shares).to(dtype) * 0.5  # The result is rounded once.
        square += expected.double().square().sum().item()
        for gradients, _ in outcomes:
            assert torch.equal(gradients[place], expected)
    v = outcomes[0][1]
    assert all(other == v for _, other in outcomes), "all ranks must have the same bits"
    assert v.grad_square == pytest.approx(square, rel=1e-12, abs=1e-30)
    assert (v.nonfinite, v.samples) == (0, sum(2**40 + rank for rank in range(len(nodes))))


@settings(max_examples=15, deadline=None)
@given(SHAPES, st.integers(0, 999))
def test_no_rank_gets_a_sum_before_every_rank_contributes(shape: tuple[list[str], int, int], seed: int):
    nodes, flat_up_to, fan_out = shape
    absent = seed % len(nodes)
    given_up = threading.Event()
    over = threading.Timer(0.05, given_up.set)

    def body(comm: Communicator) -> str:
        if comm.rank == absent:
            return "absent"
        with contextlib.suppress(HaltedError):
            finish_sums(start_sums(comm, [1.0], "commit"))
            return "passed"
        return "left"

    over.start()
    halts = dict.fromkeys(range(len(nodes)), given_up.is_set)
    outcomes = run_threads(nodes, body, seed=seed, flat_up_to=flat_up_to, fan_out=fan_out, halts=halts)
    over.cancel()
    assert outcomes == ["absent" if rank == absent else "left" for rank in range(len(nodes))]


# ---- real groups ----

#: Two levels and a third one, with a rank that owns nothing on the first, and one on the second.
NODES = ["a", "a", "a", "b", "b", "c", "c"]


def real_body(seat: Seat) -> dict[str, Any]:
    """Build the groups of several jobs in one set of processes."""
    outcome: dict[str, Any] = {}
    comm = seat.connect(1, nodes=NODES, any_to_any=False, flat_up_to=1, fan_out=2)
    outcome["owners"] = comm.owners
    outcome["sums"] = finish_sums(start_sums(comm, [0.1 * (seat.rank + 1), 1 / 3, 1.0], "sums"))
    outcome["v"] = finish_commit(start_commit(comm, (Flag.SWAP,)), EMPTY_RESULT)
    for dtype in (torch.float32, torch.bfloat16):
        for bucket_bytes, numel in ((64, 50), (1 << 22, 300_000)):  # Each size spreads the buckets in another way.
            buckets = buckets_of(seat.rank, dtype, numel, bucket_bytes)
            reduce_gradients([buckets], comm, 0.5, 1e9)
            buckets.use_reduced()
            gradients = [p.grad for p in buckets.parameters if p.grad is not None]
            outcome[f"{dtype} {numel}"] = torch.cat(gradients).double().numpy()
    with pytest.raises(RuntimeError, match="no group of all 7"):
        comm.start_all_to_all(torch.zeros(7), torch.zeros(7))
    seat.meet()
    comm.retire(sever=False)
    # If tokens go anywhere, there is also a group of all ranks.
    comm = seat.connect(2, nodes=NODES, flat_up_to=1, fan_out=2)
    gathered = torch.zeros(7)
    comm.wait(comm.start_all_gather(gathered, torch.tensor([float(seat.rank)])))
    outcome["gathered"] = gathered.tolist()
    outcome["level groups"] = [group.size for group in comm.groups]
    seat.meet()
    comm.retire(sever=False)
    outcome["left"] = left_when_one_is_absent(seat)
    assert seat.reaper.wait_empty(60)
    return outcome


#: The absent rank, and whether it gives its share to its node before it falls silent.
ABSENT = ((5, False), (4, True), (2, True), (0, True))


def left_when_one_is_absent(seat: Seat) -> list[bool]:
    """Return for each case whether only the halt freed this rank.

    The halt comes once all ranks that can pass have passed.
    """
    left: list[bool] = []
    for generation, (absent, gives) in enumerate(ABSENT, start=3):
        halt = threading.Event()
        comm = seat.connect(generation, nodes=NODES, any_to_any=False, flat_up_to=1, fan_out=2, halt=halt, timeout_s=60)
        seat.meet()
        halting = threading.Thread(target=lambda halt=halt: (seat.meet(), halt.set()))
        stuck = seat.rank in must_leave(absent, gives=gives)
        if stuck:
            halting.start()
        try:
            if seat.rank == absent:
                if gives:
                    comm.groups[0].wait(start_sums(comm, [1.0], "commit").pending)
                left.append(True)
                continue
            finish_sums(start_sums(comm, [1.0], "commit"))
            left.append(False)
        except HaltedError:
            left.append(True)
        finally:
            if stuck:
                halting.join()
            else:
                seat.meet()
            seat.meet()
            comm.retire()
            seat.meet()
    return left


def must_leave(absent: int, *, gives: bool) -> set[int]:
    """Return the ranks that cannot pass, because a rank of one of their groups does not get that far."""
    levels = [compute_levels(NODES, rank, flat_up_to=1, fan_out=2) for rank in range(len(NODES))]
    stuck = {absent}
    for number in range(len(levels[0].owners)):
        if number or not gives:
            on_it = {rank: mine.groups[number] for rank, mine in enumerate(levels) if number < len(mine.groups)}
            stuck |= {rank for rank, group in on_it.items() if stuck & set(group)}
    for number, owners in reversed(list(enumerate(levels[0].owners))):
        level = {rank: mine.groups[number] for rank, mine in enumerate(levels) if number < len(mine.groups)}
        stuck |= {rank for rank, group in level.items() if len(group) > owners and stuck & set(group)}
    return stuck


def test_real_groups_compute_the_planned_sums_bit_identically():
    outcomes = run_world(len(NODES), real_body)
    assert outcomes[0]["owners"] == (2, 1, 2)
    for outcome in outcomes:
        assert outcome["sums"] == outcomes[0]["sums"]
        assert outcome["v"].flags == (Flag.SWAP,)
        assert outcome["gathered"] == [float(rank) for rank in range(7)]
    squares = [torch.tensor(0.1 * (rank + 1), dtype=torch.float64) for rank in range(7)]
    assert outcomes[0]["sums"][0] == level_sums(NODES, 1, 2, squares).item()
    assert outcomes[0]["sums"][2] == 7.0
    for dtype in (torch.float32, torch.bfloat16):
        for numel, bucket_bytes in ((50, 64), (300_000, 1 << 22)):
            shares = []
            for rank in range(7):
                local = buckets_of(rank, dtype, numel, bucket_bytes).parameters
                parts = [(p.grad if p.grad is not None else torch.zeros_like(p)).detach() for p in local]
                shares.append(torch.cat(parts).float())
            expected = (level_sums(NODES, 1, 2, shares).to(dtype) * 0.5).double()
            for outcome in outcomes:
                assert torch.equal(torch.from_numpy(outcome[f"{dtype} {numel}"]), expected)
    for case, (absent, gives) in enumerate(ABSENT):
        left = {rank for rank, outcome in enumerate(outcomes) if outcome["left"][case]}
        assert left == must_leave(absent, gives=gives)
        assert gives or len(left) == len(NODES)  # Without its share, no rank has passed.


def killed_body(seat: Seat) -> str:
    """Kill a rank once its node has received its share; the ranks that wait on the next level must notice."""
    halt = threading.Event()
    comm = seat.connect(1, nodes=["a", "a", "b", "b"], any_to_any=False, flat_up_to=1, halt=halt, timeout_s=5.0)
    seat.meet()
    pending = start_sums(comm, [1.0], "commit")
    comm.groups[0].wait(pending.pending)
    if seat.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    backstop = threading.Timer(60, halt.set)
    backstop.start()
    outcome = "passed"
    try:
        finish_sums(start_sums(comm.groups[1], [2.0], "commit"))
    except PeerLostError as error:
        outcome = str(error)
    backstop.cancel()
    comm.retire()
    assert seat.reaper.wait_empty(60)
    return outcome


def test_a_rank_killed_between_levels_stops_only_dependent_ranks():
    with LocalWorld(4, killed_body) as world:
        killed, other, waiting, unaware = world.results()
    assert killed is None
    assert waiting.startswith("commit in generation 1 failed")
    assert other == unaware == "passed"


# ---- building ----


class Made(Communicator):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.retired = threading.Event()

    def retire(self, *, sever: bool = True) -> None:
        self.retired.set()


def test_if_one_group_cannot_be_built_the_others_are_abandoned():
    late, failed, made = threading.Event(), threading.Event(), list[Made]()

    def build(name: str, members: Sequence[int]) -> Communicator:
        if name.startswith("1-"):
            assert failed.wait(30)
            raise PeerLostError("a peer is gone")
        if name == "all/":
            assert late.wait(30)
        made.append(Made(name))
        if name != "all/":
            failed.set()
        return made[-1]

    levels = Levels(owners=(2, 2), groups=((0, 1), (0, 2)))
    board = Board(1, lambda keys: None)
    with pytest.raises(PeerLostError, match="gone"):
        build_hierarchical(build, board, levels, 0, 4, any_to_any=True, halt=None)
    late.set()
    for name in ("0-0/", "all/"):
        while name not in [one.name for one in list(made)]:
            threading.Event().wait(0.001)
    assert all(one.retired.wait(30) for one in made)


def test_a_fault_in_the_reduction_strikes_with_levels():
    def body(comm: Communicator) -> bool:
        faults = Faults(lambda: None)
        if comm.rank == 1:
            faults.on_inject(Inject(fault="raise", step=1, phase="reducing"))
        dying = FaultingCommunicator(comm, faults, 1, "reducing")
        try:
            reduce_gradients([buckets_of(comm.rank, torch.float32, 9, 1)], dying, 1.0)
        except InjectedError:
            return True
        except HaltedError:
            pass
        return False

    given_up = threading.Event()
    over = threading.Timer(0.05, given_up.set)
    over.start()
    halts = dict.fromkeys(range(4), given_up.is_set)
    struck = run_threads(["a", "a", "b", "b"], body, seed=1, flat_up_to=1, fan_out=2, halts=halts)
    over.cancel()
    assert struck == [False, True, False, False]
