"""Gradients: local ones that survive user code, bit-identical sums of all ranks, and intact local ones afterwards."""

import hashlib
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.errors import StepUseError
from holdfast.planning.levels import BLOCK
from holdfast.runtime.groups.communicator import HaltedError, LocalCommunicator
from holdfast.runtime.reduction import bucket as bucket_module
from holdfast.runtime.reduction.bucket import sum_versions
from holdfast.runtime.reduction.reduction import GradientBuckets, reduce_gradients
from tests.harness.local_world import Seat, run_world

RANKS = 3


class Mixed(nn.Module):
    """Several dtypes, and an unused, a frozen and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.wide = nn.Linear(5, 5, dtype=torch.float64)
        self.narrow = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.unused = nn.Parameter(torch.ones(11))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.tied = self.first.bias

    def forward(self, x: torch.Tensor, *, with_half: bool = True) -> torch.Tensor:
        y = self.wide(self.first(x).double()).sum()
        return y + self.narrow(self.first(x).bfloat16()).sum().double() if with_half else y


def inputs(rank: int, micro_batch: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * rank + micro_batch))


def model() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def assert_close(
    actual: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None], scale: float
) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        mine = actual[name]
        if tensor is None:
            assert mine is None, name
        else:
            assert mine is not None, name
            torch.testing.assert_close(mine, tensor * scale, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("bucket_bytes", [1, 100, 25 << 20])
def test_reduced_gradients_of_a_single_rank_are_the_scaled_sums(bucket_bytes: int):
    plain, ours = model(), model()
    buckets = GradientBuckets(ours.parameters(), bucket_bytes=bucket_bytes)
    for _ in range(2):  # The second run overwrites the buffers of the first.
        plain.zero_grad()
        buckets.zero()
        for micro_batch in range(3):
            plain(inputs(0, micro_batch)).backward()
            ours(inputs(0, micro_batch)).backward()
            buckets.collect()
        reduced = reduce_gradients([buckets], LocalCommunicator(), 0.5)
        buckets.use_reduced()
        assert_close(gradients(ours), gradients(plain), 0.5)
        square = sum(p.grad.double().square().sum().item() for p in plain.parameters() if p.grad is not None) / 4
        assert reduced.grad_square == pytest.approx(square, rel=1e-2)  # bf16 is rounded once more.
        assert reduced.nonfinite == 0
    assert buckets.numel == sum(p.numel() for p in ours.parameters() if p.requires_grad)


def test_grad_square_is_exact_in_double():
    module = nn.Linear(300, 300, dtype=torch.float64)
    buckets = GradientBuckets(module.parameters())
    module(torch.randn(5, 300, dtype=torch.float64)).square().sum().backward()
    buckets.collect()
    square = sum(p.grad.square().sum().item() for p in module.parameters() if p.grad is not None)
    assert reduce_gradients([buckets], LocalCommunicator(), 1.0).grad_square == pytest.approx(square, rel=1e-13)


@pytest.mark.parametrize("reset", ["none", "zero_grad", "own tensor"])
def test_user_code_may_reset_gradients_between_micro_batches(reset: str):
    plain, ours = model(), model()
    buckets = GradientBuckets(ours.parameters())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    buckets.zero()
    for micro_batch in range(3):
        if reset == "none":
            for parameter in ours.parameters():
                parameter.grad = None
        elif reset == "zero_grad":
            optimizer.zero_grad(set_to_none=True)
        elif micro_batch == 1:  # A sum exists by then, so autograd's next gradient is not added to it.
            ours.first.weight.grad = torch.zeros_like(ours.first.weight)
        plain(inputs(0, micro_batch)).backward()
        ours(inputs(0, micro_batch)).backward()
        buckets.collect()
    reduce_gradients([buckets], LocalCommunicator(), 1.0)
    buckets.use_reduced()
    assert_close(gradients(ours), gradients(plain), 1.0)


@pytest.mark.parametrize("change", ["made", "made again", "zeroed", "clipped"])
def test_gradients_made_or_changed_outside_of_step_backward_are_refused(change: str):
    ours = model()
    buckets = GradientBuckets(ours.parameters())
    buckets.zero()
    if change != "made":
        buckets.check_gradients()
        ours(inputs(0, 0)).backward()
        buckets.collect()
        buckets.check_gradients()
    if change.startswith("made"):
        ours(inputs(0, 1)).backward()
    elif change == "zeroed":
        ours.zero_grad(set_to_none=False)
    else:
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1e-6)
    with pytest.raises(StepUseError, match=r"made or changed outside of step\.backward"):
        buckets.check_gradients()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_does_not_affect_hidden_sums(set_to_none: bool):
    plain, ours = model(), model()
    buckets = GradientBuckets(ours.parameters())
    for micro_batch in range(2):
        buckets.hide_sums()
        ours.zero_grad(set_to_none=set_to_none)
        buckets.check_gradients()
        ours(inputs(0, micro_batch)).backward()
        buckets.collect()
        plain(inputs(0, micro_batch)).backward()
    assert_close(gradients(ours), gradients(plain), 1.0)


def test_a_backward_pass_adds_in_place_to_sums_shown_again():
    # Otherwise a second set of gradients would exist until all are computed, the peak of a remaining worker in a
    # planned move.
    ours = model()
    buckets = GradientBuckets(ours.parameters())
    ours(inputs(0, 0)).backward()
    buckets.collect()
    sums = {id(parameter): parameter.grad for parameter in buckets.parameters}
    buckets.hide_sums()
    buckets.check_gradients()
    buckets.show_sums()
    ours(inputs(0, 1)).backward()
    touched = [parameter for parameter in buckets.parameters if parameter is not ours.unused]
    assert touched
    assert all(parameter.grad is sums[id(parameter)] for parameter in touched)
    buckets.collect()
    plain = model()
    for micro_batch in range(2):
        plain(inputs(0, micro_batch)).backward()
    assert_close(gradients(ours), gradients(plain), 1.0)


def test_a_parameter_has_no_gradient_only_in_steps_that_do_not_use_it():
    ours = model()
    buckets = GradientBuckets(ours.parameters())
    for with_half in (False, True, False):
        buckets.zero()
        ours(inputs(0, 0), with_half=with_half).backward()
        buckets.collect()
        reduce_gradients([buckets], LocalCommunicator(), 1.0)
        buckets.use_reduced()
        assert (ours.narrow.weight.grad is not None) == with_half
        assert ours.unused.grad is None


def test_local_gradients_are_kept_when_reduced_ones_are_used_and_clipped():
    ours = model()
    buckets = GradientBuckets(ours.parameters())
    ours(inputs(0, 0)).backward()
    buckets.collect()
    before = gradients(ours)
    norm = reduce_gradients([buckets], LocalCommunicator(), 1.0).grad_square ** 0.5
    reduce_gradients([buckets], LocalCommunicator(), 1.0, max_norm=0.25 * norm)
    buckets.use_reduced()
    assert_close(gradients(ours), before, 0.25)
    buckets.hide_sums()
    assert all(parameter.grad is None for parameter in ours.parameters())
    buckets.collect()
    torch.testing.assert_close(gradients(ours), before, rtol=0, atol=0)


def test_a_step_starts_from_zero_regardless_of_buffer_contents():
    plain, ours = model(), model()
    buckets = GradientBuckets(ours.parameters())
    for with_half in (True, False, True):
        plain.zero_grad()
        buckets.zero()
        assert not any(gradient is not None for gradient in gradients(ours).values())
        plain(inputs(0, 0), with_half=with_half).backward()
        ours(inputs(0, 0), with_half=with_half).backward()
        buckets.collect()
        reduce_gradients([buckets], LocalCommunicator(), 1.0)
        buckets.use_reduced()
        assert_close(gradients(ours), gradients(plain), 1.0)


def test_sparse_gradients_are_summed_densely():
    plain, ours = (nn.Embedding(6, 2, sparse=sparse, _weight=torch.ones(6, 2)) for sparse in (False, True))
    buckets = GradientBuckets(ours.parameters())
    for rows in ([1, 2], [2, 5]):
        plain(torch.tensor(rows)).square().sum().backward()
        ours(torch.tensor(rows)).square().sum().backward()
        buckets.collect()
    reduce_gradients([buckets], LocalCommunicator(), 1.0)
    buckets.use_reduced()
    assert_close(gradients(ours), gradients(plain), 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_elements_are_counted(bad: float):
    ours = model()
    buckets = GradientBuckets(ours.parameters())
    ours(inputs(0, 0)).backward()
    buckets.collect()
    assert ours.first.weight.grad is not None
    ours.first.weight.grad[0, :3] = bad
    assert ours.narrow.weight.grad is not None
    ours.narrow.weight.grad[1, 1] = bad
    reduced = reduce_gradients([buckets], LocalCommunicator(), 1.0)
    assert reduced.nonfinite == 4
    assert not math.isfinite(reduced.grad_square)


def test_large_finite_doubles_are_not_counted_as_nonfinite():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    buckets = GradientBuckets([parameter])
    (parameter * 1e200).sum().backward()
    buckets.collect()
    assert reduce_gradients([buckets], LocalCommunicator(), 1.0).nonfinite == 0


def test_note_flags_are_reduced_even_without_trainable_parameters():
    buckets = GradientBuckets([nn.Parameter(torch.zeros(2), requires_grad=False)])
    for noted in (True, False):
        buckets.set_has_notes(noted)
        reduced = reduce_gradients([buckets], LocalCommunicator(), 0.5, 1.0)
        assert (reduced.grad_square, reduced.nonfinite, buckets.any_rank_has_notes()) == (0.0, 0, noted)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 4000), st.integers(1, 400))
def test_shards_cover_every_bucket_for_every_world(sizes: list[int], world: int, bucket_bytes: int):
    communicator = LocalCommunicator()
    communicator.size = world
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    buckets = GradientBuckets(parameters, bucket_bytes=bucket_bytes)
    members = [parameter for bucket in buckets._buckets for parameter in bucket.parameters]
    assert {id(p) for p in members} == {id(p) for p in parameters}
    assert len(members) == len(parameters)
    for bucket in buckets._buckets:
        bucket.fill_buffer(communicator)
        (_, whole), (_, shard) = bucket._spans
        assert bucket.used <= world * shard == whole <= bucket.flat.numel()
        shared = bucket.flat.untyped_storage().data_ptr()
        assert all(view.untyped_storage().data_ptr() == shared for view in bucket.views)


def lone_body(seat: Seat, size: int) -> tuple[float, bytes]:
    """Only one rank has gradients, as in a step that others join with nothing to compute."""
    communicator = seat.connect(1)
    torch.manual_seed(0)
    module = nn.Linear(size, 37)
    buckets = GradientBuckets(module.parameters(), bucket_bytes=1)
    if seat.rank == 0:
        module(torch.randn(5, size)).square().sum().backward()
        buckets.collect()
    reduced = reduce_gradients([buckets], communicator, 1.0, max_norm=0.3)
    buckets.use_reduced()
    seat.meet()
    communicator.retire(sever=False)
    assert seat.reaper.wait_empty(60)
    assert module.weight.grad is not None
    return reduced.grad_square, module.weight.grad.numpy().tobytes()


def test_norm_and_clipped_gradients_are_bit_identical_for_every_world_size():
    outcomes = [outcome for world in (1, 2, 3) for outcome in run_world(world, lone_body, 211)]
    assert len(outcomes) == 6
    assert len(set(outcomes)) == 1


def digest(module: nn.Module) -> str:
    state = hashlib.sha256()
    for tensor in gradients(module).values():
        state.update(b"-" if tensor is None else tensor.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def reduced_body(seat: Seat, bucket_bytes: int) -> tuple[str, float, dict[str, Any]]:
    communicator = seat.connect(1)
    ours = model()
    buckets = GradientBuckets(ours.parameters(), bucket_bytes=bucket_bytes)
    for step in range(3):
        buckets.zero()
        ours(inputs(seat.rank, step), with_half=seat.rank == 1).backward()
        buckets.collect()
        local = gradients(ours)
        reduced = reduce_gradients([buckets], communicator, 1 / RANKS)
        torch.testing.assert_close(gradients(ours), local, rtol=0, atol=0)  # The local gradients must stay intact.
    buckets.use_reduced()
    seat.meet()
    communicator.retire(sever=False)
    assert seat.reaper.wait_empty(60)
    numpy = {name: None if t is None else t.double().numpy() for name, t in gradients(ours).items()}
    return digest(ours), reduced.grad_square, numpy


@pytest.mark.parametrize("bucket_bytes", [64, 25 << 20])
def test_all_ranks_get_a_bit_identical_mean(bucket_bytes: int):
    outcomes = run_world(RANKS, reduced_body, bucket_bytes)
    assert len({bits for bits, _, _ in outcomes}) == 1
    plain = model()
    for rank in range(RANKS):
        plain(inputs(rank, 2), with_half=rank == 1).backward()
    square = 0.0
    for name, expected in gradients(plain).items():
        mine = outcomes[0][2][name]
        if expected is None:
            assert mine is None
            continue
        rough = expected.dtype == torch.bfloat16
        mean = expected.double() / RANKS
        square += mean.square().sum().item()
        torch.testing.assert_close(torch.from_numpy(mine), mean, rtol=1e-2 if rough else 1e-5, atol=1e-6)
    for _, part, _ in outcomes:
        assert part == outcomes[0][1] == pytest.approx(square, rel=1e-2), "the step result must be equal on all ranks"


def clipped_body(seat: Seat, max_norm: float) -> tuple[str, float, list[np.ndarray]]:
    communicator = seat.connect(1)
    ours = nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 3))
    torch.manual_seed(0)
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    buckets = GradientBuckets(ours.parameters(), bucket_bytes=10_000)
    ours(inputs_of(seat.rank)[:, :70]).square().sum().backward()
    buckets.collect()
    local = [p.grad.clone() for p in ours.parameters() if p.grad is not None]
    square = reduce_gradients([buckets], communicator, 1 / RANKS, max_norm).grad_square
    for parameter, gradient in zip(ours.parameters(), local, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    buckets.use_reduced()
    bits = digest(ours)
    seat.meet()
    communicator.retire(sever=False)
    assert seat.reaper.wait_empty(60)
    return bits, square, [gradient.numpy() for gradient in local]


@pytest.mark.parametrize("share", [0.3, 2.0])
def test_gradients_are_clipped_by_the_norm_over_all_ranks_as_torch_does(share: float):
    free = run_world(RANKS, clipped_body, math.inf)
    norm = free[0][1] ** 0.5
    outcomes = run_world(RANKS, clipped_body, share * norm)
    assert len({bits for bits, _, _ in outcomes}) == 1
    plain = nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 3))
    for place, parameter in enumerate(plain.parameters()):
        parameter.grad = torch.zeros_like(parameter)
        for _, _, local in outcomes:  # Sum in rank order, as holdfast does.
            parameter.grad += torch.from_numpy(local[place])
        parameter.grad.mul_(1 / RANKS)
    if share < 1:
        theirs = [nn.Parameter(parameter.detach()) for parameter in plain.parameters()]
        for parameter, other in zip(plain.parameters(), theirs, strict=True):
            assert parameter.grad is not None
            other.grad = parameter.grad.clone()
            parameter.grad.mul_(share * norm / (norm + 1e-6))
        torch.nn.utils.clip_grads_with_norm_(theirs, share * norm, torch.tensor(norm))
        for parameter, other in zip(plain.parameters(), theirs, strict=True):
            # torch divides in float32 and holdfast in float64, so the quotient's last bit depends on the norm's.
            torch.testing.assert_close(parameter.grad, other.grad, rtol=3e-7, atol=0)
    assert {square for _, square, _ in outcomes} == {free[0][1]}  # The reported norm is the norm before clipping.
    assert outcomes[0][0] == digest(plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype):
    # With rounding after each addition, all of the small ones would be lost.
    versions = [torch.tensor([256.0], dtype=dtype), *(torch.tensor([0.5], dtype=dtype) for _ in range(8))]
    out = torch.empty(1, dtype=dtype)
    sum_versions(versions, out)
    assert out.item() == 260.0
    # A third of 261: if rounded before scaling, the sum in bfloat16 would be 260, and its third 86.5.
    sum_versions([*versions, torch.tensor([1.0], dtype=dtype)], out, 1 / 3)
    assert out.item() == 87.0


def test_a_mean_is_correct_although_its_sum_overflows_half_precision():
    versions = [torch.tensor([30_000.0], dtype=torch.float16) for _ in range(9)]
    out = torch.empty(1, dtype=torch.float16)
    sum_versions(versions, out, 1 / 9)
    assert out.item() == 30_000.0


def redone_body(seat: Seat) -> str:
    """The last rank is missing in the first reduction; the others reduce the same gradients again without it."""
    halt = threading.Event()
    communicator = seat.connect(1, halt=halt, timeout_s=5.0)
    module = nn.Linear(500, 500)
    buckets = GradientBuckets(module.parameters(), bucket_bytes=1)
    module(inputs_of(seat.rank)).sum().backward()
    buckets.collect()
    local = gradients(module)
    if seat.rank < seat.size - 1:
        threading.Timer(0.005, halt.set).start()
        with pytest.raises(HaltedError):
            reduce_gradients([buckets], communicator, 1.0)
    seat.meet()
    communicator.retire()
    outcome = "left out"
    if seat.rank < seat.size - 1:
        second = seat.connect(2, rank=seat.rank, size=seat.size - 1)
        reduce_gradients([buckets], second, 1.0)
        buckets.use_reduced()
        expected = nn.Linear(500, 500)
        for rank in range(seat.size - 1):
            expected(inputs_of(rank)).sum().backward()
        assert_close(gradients(module), gradients(expected), 1.0)
        outcome = digest(module)
        buckets.hide_sums()
        buckets.collect()
        assert_close(gradients(module), local, 1.0)
    seat.meet()
    if outcome != "left out":
        second.retire(sever=False)
    assert seat.reaper.wait_empty(60)
    return outcome


def inputs_of(rank: int) -> torch.Tensor:
    return torch.randn(6, 500, generator=torch.Generator().manual_seed(rank))


def test_survivors_redo_an_abandoned_reduction():
    first, second, third = run_world(3, redone_body)
    assert first == second
    assert third == "left out"


def test_buckets_share_memory_for_received_gradients(monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []
    real = bucket_module.large_zeros

    def counted(numel: int, **kinds: Any) -> torch.Tensor:
        made.append(numel)
        return real(numel, **kinds)

    monkeypatch.setattr(bucket_module, "large_zeros", counted)
    parameters = [nn.Parameter(torch.zeros(100_000)) for _ in range(20)]
    buckets = GradientBuckets(parameters, bucket_bytes=1)
    for _ in range(2):
        buckets.zero()
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        buckets.collect()
        reduce_gradients([buckets], LocalCommunicator(), 1.0)
    # Each has its own buffer of gradients, padded so that it can be cut into shards. Results need memory only in
    # transit.
    shards = len(parameters) * BLOCK * bucket_module.FIRST_SHARDS
    assert sum(made) < buckets.numel + shards + 5 * 120_000
