"""Local ranks with the same tokens split them: all get the bits that one rank alone would compute; and refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import BadInputError
from holdfast.runtime.groups.communicator import HaltedError
from holdfast.runtime.moe.layer.same_tokens import TokenSplit

DIM, PLACES = 4, 3


def moe(**options: Any) -> holdfast.MoE:
    return holdfast.MoE(DIM, 8, 5, 2, seed=1, aux_loss=0.1, **options).double()


def tokens_of(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, DIM, generator=generator, dtype=torch.float64)


class Threads:
    """The group of the local ranks, each a thread; a missing rank breaks the others."""

    def __init__(self, number: int, barrier: threading.Barrier, given: dict[int, torch.Tensor]) -> None:
        self._number, self._barrier, self._given = number, barrier, given

    def rank(self) -> int:
        return self._number

    def size(self) -> int:
        return PLACES

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor) -> Threads:
        self._given[self._number] = input.clone()
        self._barrier.wait(30)
        output.copy_(torch.stack([self._given[number] for number in range(PLACES)]).view(output.shape))
        self._barrier.wait(30)
        return self

    def wait(self) -> bool:
        return True


def at_all_places(body: Callable[[int, TokenSplit], Any]) -> list[Any]:
    barrier, given = threading.Barrier(PLACES), dict[int, torch.Tensor]()
    with ThreadPoolExecutor(PLACES) as threads:
        places = [TokenSplit(Threads(number, barrier, given)) for number in range(PLACES)]
        return list(threads.map(body, range(PLACES), places))


def passed(layer: holdfast.MoE, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a forward pass's output and loss, the gradients of tokens and router, and the experts' gradients."""
    tokens = tokens.clone().requires_grad_()
    out = layer(tokens)
    ((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() + layer.aux_loss).backward()
    alike = (out, layer.aux_loss, tokens.grad, layer.router.weight.grad)
    return *(one.detach() for one in alike if one is not None), *(w.grad for w in layer.experts.parameters())


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.7, "jitter": 0.2}], ids=["plain", "capacity, noise"])
@pytest.mark.parametrize("count", [7, 2, 0])
def test_all_ranks_get_the_result_of_one_rank(count: int, options: dict[str, Any]) -> None:
    tokens = tokens_of(count)
    expected = passed(moe(**options), tokens)

    def place(_: int, same: TokenSplit) -> tuple[torch.Tensor, ...]:
        layer = moe(**options)
        layer.token_split = same
        return passed(layer, tokens)

    found = at_all_places(place)
    for one in found:
        for mine, first, whole in zip(one[:4], found[0][:4], expected[:4], strict=True):
            assert torch.equal(mine, first), "all local ranks must have the same bits"
            torch.testing.assert_close(mine, whole, rtol=1e-13, atol=1e-15)
    for weight, whole in enumerate(expected[4:], 4):
        torch.testing.assert_close(sum(one[weight] for one in found), whole, rtol=1e-13, atol=1e-15)


def test_choices_are_counted_once() -> None:
    tokens = tokens_of(7)

    def place(_: int, same: TokenSplit) -> torch.Tensor:
        layer = holdfast.MoE(DIM, 8, 5, 2, seed=1, gate=holdfast.TopKGate(5, 2, bias_rate=0.1)).double()
        layer.token_split = same
        layer(tokens).sum().backward()
        return layer.binding.state.micro_batch_choices[0]

    alone = holdfast.MoE(DIM, 8, 5, 2, seed=1, gate=holdfast.TopKGate(5, 2, bias_rate=0.1)).double()
    alone(tokens).sum().backward()
    assert torch.equal(sum(at_all_places(place)), alone.binding.state.micro_batch_choices[0])


@pytest.mark.parametrize("capacity", [None, 0.7])
def test_a_rank_with_a_void_step_does_not_block_other_ranks(capacity: float | None) -> None:
    tokens = tokens_of(7)
    whole = passed(moe(capacity_factor=capacity), tokens)[0]
    close = partial(torch.testing.assert_close, rtol=1e-13, atol=1e-15)

    def place(number: int, same: TokenSplit) -> tuple[torch.Tensor, ...]:
        layer = moe(capacity_factor=capacity)
        layer.token_split = same
        if number == 1:
            layer.binding.state.mark_void(HaltedError("a Stop"))
        return passed(layer, tokens)

    found = at_all_places(place)
    for one in found:
        close(one[0][:3], whole[:3])
        assert not one[0][3:6].any(), "the void rank must contribute nothing"
        close(one[0][6:], whole[6:])
        assert one[3].any(), "all ranks must have gradients of the router, as FSDP2 needs it"


def refused_at_all(given: Sequence[torch.Tensor]) -> list[str]:
    def place(number: int, same: TokenSplit) -> str:
        layer = moe()
        layer.token_split = same
        with pytest.raises(BadInputError) as refused:
            layer(given[number])
        return str(refused.value)

    return at_all_places(place)


def test_different_tokens_on_each_rank_are_refused() -> None:
    """For example if activations are sharded along the sequence."""
    for given, counts in ((tokens_of(6).chunk(3), "2, 2, 2"), ([tokens_of(7)[:n] for n in (7, 7, 6)], "7, 7, 6")):
        for why in refused_at_all(given):
            assert f"other tokens on each local rank along tensor ({counts} of them)" in why
