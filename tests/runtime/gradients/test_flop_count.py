"""FLOP counted during a micro-batch: the exact number or none, with bit-identical results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from holdfast.runtime.gradients import flop_count
from holdfast.runtime.gradients.flop_count import FirstRoundCounter, FlopCounter
from holdfast.runtime.moe.layer.moe_layer import MoE

Gradients = list[torch.Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BTD.shape
        query, key, value = self.project(x_BTD).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x_BTD.shape))


def convolutions() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(first, nn.Conv2d(8, 16, 3, stride=2, groups=2), nn.Flatten(), nn.Linear(16 * 49, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)), (16, 32)),
    "attention": (Attention, (4, 24, 32)),
    "convolutions": (convolutions, (4, 3, 16, 16)),
    "encoder": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (4, 24, 32)),
    "experts": (lambda: MoE(32, 64, 4, top_k=2, seed=1, layer=0), (16, 32)),
    "recurrent": (lambda: nn.GRU(32, 16), (5, 4, 32)),
}


def computed(make: Callable[[], nn.Module], shape: tuple[int, ...], begin: Callable[[], Any]) -> Gradients:
    torch.manual_seed(1)
    model, x = make(), torch.randn(*shape)
    begin()
    out = model(x)
    (out[0] if isinstance(out, tuple) else out).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_counting_flop_does_not_change_results(name: str) -> None:
    make, shape = MODELS[name]
    plain = computed(make, shape, lambda: None)
    count = FlopCounter()
    counted = computed(make, shape, count.start)
    assert (count.stop() or 0) > 0
    assert len(plain) == len(counted)
    assert all(torch.equal(one, other) for one, other in zip(plain, counted, strict=True))


@pytest.mark.parametrize("name", ["layers", "convolutions", "encoder", "recurrent"])
def test_the_flop_count_matches_that_of_torch(name: str) -> None:
    make, shape = MODELS[name]
    count, torchs = FlopCounter(), FlopCounterMode(display=False)
    computed(make, shape, count.start)
    found = count.stop()
    computed(make, shape, torchs.__enter__)
    torchs.__exit__(None, None, None)
    assert found == torchs.get_total_flops()


def test_the_flop_of_attention_are_those_of_its_matrix_products() -> None:
    count = FlopCounter()
    computed(*MODELS["attention"], count.start)
    tokens, score = 4 * 24, 2 * 4 * 4 * 24 * 24 * 8
    # The projection's input needs no gradient, so two of three products remain. Attention takes two forward and five
    # backward.
    assert count.stop() == 2 * (2 * tokens * 32 * 96) + 3 * (2 * tokens * 32 * 32) + 7 * score


def test_the_flop_of_experts_follow_the_experts_per_token() -> None:
    count = FlopCounter()
    computed(*MODELS["experts"], count.start)
    tokens, router = 16, 2 * 16 * 32 * 4
    matrix = 2 * (2 * tokens) * 32 * 64
    # The layer's input needs no gradient, so the router takes two products, but the experts compute the gradient of
    # their rows. The last term is the gradient of the weights that combine a token's experts.
    assert count.stop() == 3 * 2 * matrix + 2 * router + 2 * (2 * tokens) * 32


@pytest.mark.parametrize(
    "compute",
    [
        lambda: nn.LSTM(8, 4)(torch.randn(3, 2, 8)),
        lambda: torch.linalg.inv(torch.eye(3)),
        lambda: torch.fft.fft(torch.randn(8)),
        lambda: torch.randn(3, 3).to_sparse() @ torch.randn(3, 3),
        lambda: torch.cdist(torch.randn(30, 3), torch.randn(30, 3)),
    ],
)
def test_no_flop_are_reported_after_an_unknown_operation(compute: Callable[[], object]) -> None:
    count = FlopCounter()
    count.start()
    torch.randn(4, 4) @ torch.randn(4, 4)
    compute()
    assert count.stop() is None


def test_no_flop_are_reported_after_a_custom_operation() -> None:
    library = torch.library.Library("holdfast_tests", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    count = FlopCounter()
    count.start()
    torch.ops.holdfast_tests.twice(torch.ones(3))
    assert count.stop() is None


def test_no_flop_are_counted_if_code_may_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flop_count, "may_be_compiled", lambda: True)
    count = FlopCounter()
    count.start()
    assert not count.is_counting
    assert _get_current_dispatch_mode() is None


def test_a_call_of_torch_compile_is_detected() -> None:
    from torch._dynamo import eval_frame

    before = dict(eval_frame.cached_backends)
    eval_frame.cached_backends.clear()
    try:
        assert not flop_count.may_be_compiled()
        torch.compile(nn.Linear(2, 2), backend="eager")
        assert flop_count.may_be_compiled()
    finally:
        eval_frame.cached_backends.clear()
        eval_frame.cached_backends.update(before)


class Own(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_of_the_script_is_not_removed() -> None:
    count, own = FlopCounter(), Own()
    with own:
        count.start()
        torch.randn(4, 4) @ torch.randn(4, 4)
        assert count.stop() == 128
        assert _get_current_dispatch_mode() is own
    count.start()
    ours = _get_current_dispatch_mode()
    with own:
        assert count.stop() is None, "a mode below another one cannot be removed"
        assert _get_current_dispatch_mode() is own
    assert _get_current_dispatch_mode() is ours
    assert ours is not None
    ours.__exit__(None, None, None)


def counted_in(first: FirstRoundCounter) -> list[bool]:
    """Compute two rounds; return in which of them FLOP were counted."""
    found: list[bool] = []
    for _ in range(2):
        first.start_round()
        torch.randn(4, 4) @ torch.randn(4, 4)
        found.append(first.stop_round() is not None)
    return found


def test_flop_are_counted_in_round_one_of_the_second_step_per_generation() -> None:
    first = FirstRoundCounter()
    first.start_attempt(1, 5, asked=True)
    assert counted_in(first) == [False, False]
    first.start_attempt(1, 6, asked=True)
    assert counted_in(first) == [True, False]
    first.start_attempt(1, 7, asked=True)
    assert counted_in(first) == [False, False]
    first.start_attempt(2, 7, asked=True)
    assert counted_in(first) == [False, False]
    first.start_attempt(2, 8, asked=False)
    assert counted_in(first) == [False, False]


def test_an_abandoned_round_is_no_longer_counted() -> None:
    first = FirstRoundCounter()
    first.start_attempt(1, 1, asked=True)
    first.start_attempt(1, 2, asked=True)
    first.start_round()
    first.start_attempt(2, 2, asked=True)
    assert _get_current_dispatch_mode() is None
    assert first.stop_round() is None
