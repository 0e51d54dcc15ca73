"""One test suite for all dispatchers of tokens: each scheme with each kernel implementation.

Triton's kernels run here in its interpreter, on the CPU. Triton enables it by a variable that it reads on import, so
this file runs again in a separate process.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import BadInputError
from holdfast.planning import DispatchScheme, Interval, MinMax, NodeInterval, Proportional, dispatch_schedule
from holdfast.runtime.groups.communicator import LocalCommunicator
from holdfast.runtime.moe.hosts import count_layer_replicas, place_everywhere
from holdfast.runtime.moe.kernels.interface import DispatchInputs, Movement, TokenKernels
from holdfast.runtime.moe.kernels.kernel_choice import has_triton, kernels_for
from holdfast.runtime.moe.kernels.torch_kernels import TorchKernels
from holdfast.runtime.moe.layer.moe_layer import MoE
from holdfast.runtime.moe.layer.rounds import StepState
from holdfast.runtime.moe.layer.token_exchange import Channel, Route, from_experts, to_experts

SWITCH = "TRITON_INTERPRET"
INTERPRETED = os.environ.get(SWITCH) == "1"
# Each interpreted program takes milliseconds.
PROPERTY = settings(derandomize=True, deadline=None, max_examples=5 if INTERPRETED else 60, database=None)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def kernels() -> TokenKernels:
    if not INTERPRETED:
        return TorchKernels()
    from holdfast.runtime.moe.kernels.triton_kernels import TritonKernels

    return TritonKernels()


@pytest.mark.skipif(INTERPRETED, reason="the test would start itself again")
def test_triton_passes_this_suite_in_its_interpreter() -> None:
    if not has_triton():
        pytest.skip("Triton is not installed: CPU builds of torch do not include it")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env={**os.environ, SWITCH: "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_cpu_kernels_do_not_need_triton() -> None:
    for dtype in (torch.float32, torch.float64):
        assert kernels_for(torch.device("cpu"), dtype).name == "torch"


def schemes(ranks: int) -> tuple[DispatchScheme, ...]:
    return Interval(), Proportional(), NodeInterval(np.arange(ranks) // 2), MinMax()


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[list[int]], list[np.ndarray], int]:
    """Draw a placement of one layer, and the assignments of each rank."""
    ranks, experts = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert in range(experts):
        for rank in draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=2 * ranks)):
            held[rank].append(expert)
    lists = st.lists(st.integers(0, experts - 1), max_size=12)
    assigned = [np.array(draw(lists), dtype=np.int64) for _ in range(ranks)]
    return held, assigned, experts


# ---- the plan ----


@PROPERTY
@given(worlds(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_every_assignment_is_computed_once_on_a_rank_with_its_expert(kernels, world, which, random) -> None:  # type: ignore[no-untyped-def]
    held, assigned, experts = world
    ranks = len(held)
    scheme = schemes(ranks)[which]
    tokens = np.stack([np.bincount(mine, minlength=experts) for mine in assigned], axis=1)
    replicas = count_layer_replicas(held, experts)
    capacities = dispatch_schedule(tokens, replicas, scheme).capacities
    rows = []
    for mine in held:
        seats = [*sorted(set(mine)), -1]
        random.shuffle(seats)
        rows.append(seats)
    moves = [
        kernels.plan(
            DispatchInputs(
                assigned_A=torch.from_numpy(assigned[rank]),
                # The layout after a gather, with one row per rank.
                tokens_EN=torch.from_numpy(np.ascontiguousarray(tokens.T)).T,
                replicas=replicas,
                rank=rank,
                row_experts=rows[rank],
                scheme=scheme,
            )
        )
        for rank in range(ranks)
    ]
    # Rows are (source rank, assignment). The splits determine their exchange.
    leaving = [[(rank, int(number)) for number in moves[rank].send_order] for rank in range(ranks)]
    computed: list[tuple[int, int]] = []
    for me, move in enumerate(moves):
        check_orders(move, len(rows[me]))
        arrived: list[tuple[int, int]] = []
        for source in range(ranks):
            start = sum(moves[source].send[:me])
            part = leaving[source][start : start + moves[source].send[me]]
            assert len(part) == move.receive[source]
            arrived += part
        by_row = [arrived[int(place)] for place in move.receive_order]
        start = 0
        for row, end in enumerate(move.row_ends.tolist()):
            part = by_row[start:end]
            expert = rows[me][row]
            assert all(assigned[source][number] == expert for source, number in part)
            # The order is fixed: it does not depend on timing, or on the rank that computed the plan.
            assert part == sorted(part)
            assert len(part) == (int(capacities[expert, me]) if expert >= 0 else 0)
            start = end
        computed += by_row
    assert sorted(computed) == [(rank, number) for rank in range(ranks) for number in range(assigned[rank].size)]


def check_orders(move: Movement, rows: int) -> None:
    """Check that orders are permutations with their inverses, in the types that the layer uses."""
    for order, inverse, size in (
        (move.send_order, move.send_inverse, sum(move.send)),
        (move.receive_order, move.receive_inverse, sum(move.receive)),
    ):
        assert order.dtype == inverse.dtype == torch.int64
        assert order[inverse].tolist() == inverse[order].tolist() == list(range(size))
    assert not move.in_order or move.receive_order.tolist() == list(range(sum(move.receive)))
    assert move.row_ends.dtype == torch.int32
    assert move.row_ends.shape == (rows,)


def test_all_kernels_plan_many_ranks_and_experts_equally(kernels: TokenKernels) -> None:
    rng = np.random.default_rng(0)
    experts, ranks, rank = 37, 50, 17
    assigned = [rng.integers(0, experts, 300) ** 2 // experts for _ in range(ranks)]
    tokens = np.stack([np.bincount(mine, minlength=experts) for mine in assigned], axis=1)
    replicas = rng.integers(0, 3, (experts, ranks))
    replicas[:, 3] += 1
    question = DispatchInputs(
        assigned_A=torch.from_numpy(assigned[rank]),
        tokens_EN=torch.from_numpy(tokens),
        replicas=replicas,
        rank=rank,
        row_experts=np.flatnonzero(replicas[:, rank]).tolist(),
        scheme=Interval(),
    )
    ours, plain = kernels.plan(question), TorchKernels().plan(question)
    assert (ours.send, ours.receive) == (plain.send, plain.receive)
    for name in ("send_order", "send_inverse", "receive_order", "receive_inverse", "row_ends"):
        assert torch.equal(getattr(ours, name), getattr(plain, name))


@pytest.mark.parametrize(
    ("tokens", "rows", "in_order"),
    [([[2], [1]], [0, 1], True), ([[2], [1]], [1, -1, 0], False), ([[1, 1], [1, 0]], [0, 1], False)],
)
def test_a_plan_detects_rows_that_are_already_in_order(
    kernels: TokenKernels, tokens: list[list[int]], rows: list[int], in_order: bool
) -> None:
    table = torch.tensor(tokens)
    assigned = torch.repeat_interleave(torch.arange(2), table[:, 0])
    replicas = np.eye(2, table.shape[1], dtype=np.int64)
    replicas[:, 0] = 1
    question = DispatchInputs(
        assigned_A=assigned, tokens_EN=table, replicas=replicas, rank=0, row_experts=rows, scheme=Interval()
    )
    move = kernels.plan(question)
    assert move.in_order == in_order
    check_orders(move, len(rows))


def test_tokens_for_an_expert_without_a_replica_are_refused(kernels: TokenKernels) -> None:
    question = DispatchInputs(
        assigned_A=torch.tensor([0, 1]),
        tokens_EN=torch.tensor([[1], [1]]),
        replicas=np.array([[1], [0]]),
        rank=0,
        row_experts=[0],
        scheme=Interval(),
    )
    with pytest.raises(BadInputError, match="expert 1 has 1 tokens but no replica"):
        kernels.plan(question)


# ---- rows ----


@PROPERTY
@given(
    st.integers(0, 9), st.integers(1, 4), st.sampled_from([1, 3, 16, 40]), st.sampled_from(DTYPES), st.integers(0, 99)
)
def test_rows_and_gradients_match_plain_indexing(kernels, tokens, top_k, dim, dtype, seed) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    number = tokens * top_k
    order, received = (torch.randperm(number, generator=generator) for _ in range(2))
    inverse, unreceived = torch.argsort(order), torch.argsort(received)
    tokens_TD = torch.randn(tokens, dim, generator=generator).to(dtype)
    weights_TK = torch.rand(tokens, top_k, generator=generator)
    move = Movement(
        send=(number,),
        receive=(number,),
        send_order=order,
        send_inverse=inverse,
        receive_order=received,
        receive_inverse=unreceived,
        in_order=False,
        row_ends=torch.tensor([number], dtype=torch.int32),
    )
    channel = Channel(comm=LocalCommunicator(), state=StepState())
    route = Route(channel=channel, movement=move, kernels=kernels, top_k=top_k)

    def through(to_experts, from_experts):  # type: ignore[no-untyped-def]
        leaves = tokens_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        rows = to_experts(leaves[0])
        mixed = from_experts(rows.sin(), leaves[1])
        # Doubled expanded gradients, as sum() produces them.
        return [rows, mixed, *torch.autograd.grad([rows.sum(), mixed.sum()], leaves)]

    got = through(
        lambda x: to_experts(x, route),
        lambda x, weights: from_experts(x, weights, route, dtype),
    )
    wanted = through(
        lambda x: x[order // top_k][received],
        lambda x, weights: (x[unreceived][inverse].view(tokens, top_k, dim) * weights.unsqueeze(-1)).sum(1).to(dtype),
    )
    # Allow for one rounding to bfloat16, and for another order of the sums.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for mine, plain in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, plain, **tolerance)
    assert torch.equal(got[0], wanted[0])


def test_second_order_gradients_are_refused(kernels: TokenKernels) -> None:
    layer = MoE(8, 16, 2, 1, seed=1)
    layer.bind(Channel(comm=LocalCommunicator(), state=StepState()), place_everywhere([2], 1)[0], kernels=kernels)
    tokens = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(tokens).square().sum(), tokens, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# ---- the layer on top ----


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 2)])
@pytest.mark.parametrize("dispatch", ["interval", "proportional", "minmax"])
def test_a_layer_with_these_kernels_matches_the_plain_layer(
    kernels: TokenKernels, dispatch: str, experts: int, top_k: int
) -> None:
    layers = [MoE(8, 16, experts, top_k, seed=1, dispatch=dispatch) for _ in range(2)]
    layers[1].bind(
        Channel(comm=LocalCommunicator(), state=StepState()), place_everywhere([experts], 1)[0], kernels=kernels
    )
    for shape in ((3, 4, 8), (0, 8)):
        tokens = torch.randn(shape, requires_grad=True)
        results = []
        for layer in layers:
            out = layer(tokens)
            results.append([out, *torch.autograd.grad(out.square().sum(), [tokens, *layer.parameters()])])
        for plain, mine in zip(*results, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


def test_an_unknown_dispatch_is_refused() -> None:
    with pytest.raises(BadInputError, match="dispatch is 'fair': choose one of interval, proportional, minmax"):
        MoE(8, 16, 2, 1, dispatch="fair")
