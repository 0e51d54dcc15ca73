"""Every form of stacked experts computes the same as its experts one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from holdfast.errors import BadInputError
from holdfast.runtime.moe.experts.module_experts import ModuleExperts
from holdfast.runtime.moe.experts.stack import ExpertStack, StackedExperts, draw_experts, gated_activation

DIM, HIDDEN, EXPERTS = 8, 12, 3
SIZES = (4, 0, 7)


class Squared(nn.Module):
    """Two layers with biases, a norm, and another activation function between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x)).square()


def with_biases(outputs_first: bool) -> StackedExperts:
    generator = torch.Generator().manual_seed(3)
    shapes = ((EXPERTS, 2 * HIDDEN, DIM), (EXPERTS, DIM, HIDDEN))
    w1, w2 = (torch.randn(shape, generator=generator) for shape in shapes)
    b1, b2 = torch.randn(EXPERTS, 2 * HIDDEN, generator=generator), torch.randn(EXPERTS, DIM, generator=generator)
    if not outputs_first:
        w1, w2 = w1.mT.contiguous(), w2.mT.contiguous()
    w1, w2, b1, b2 = (nn.Parameter(w) for w in (w1, w2, b1, b2))
    return StackedExperts(w1, w2, gated_activation(F.silu), b1=b1, b2=b2, outputs_first=outputs_first)


def stack(kind: str) -> ExpertStack:
    if kind == "modules":
        return ModuleExperts(Squared, DIM, HIDDEN, EXPERTS, seed=1, layer=0)
    if kind.startswith("biases"):
        return with_biases(kind.endswith("outputs first"))
    activation = F.silu if kind == "gated" else F.gelu
    return draw_experts(DIM, HIDDEN, EXPERTS, activation, gate=kind == "gated", seed=1, layer=0)


def one_expert(experts: Any, row: int, x: torch.Tensor) -> torch.Tensor:
    """Compute one expert in the plainest way."""
    if isinstance(experts, ModuleExperts):
        module = Squared(DIM, HIDDEN).to(x.dtype)
        weights = {name.replace("-", "."): weight[row] for name, weight in experts.weights().items()}
        return torch.func.functional_call(module, weights, (x,))
    w1, w2 = (w[row] for w in (experts.w1, experts.w2))
    if experts.b1 is None:
        both = x @ w1
        hidden = F.gelu(both) if both.shape[1] == HIDDEN else F.silu(both[:, :HIDDEN]) * both[:, HIDDEN:]
        return hidden @ w2
    w1, w2 = (w1.T, w2.T) if w1.shape[1] == DIM else (w1, w2)
    both = x @ w1 + experts.b1[row]
    return (F.silu(both[:, :HIDDEN]) * both[:, HIDDEN:]) @ w2 + experts.b2[row]


KINDS = ("plain", "gated", "biases", "biases, outputs first", "modules")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_stacked_experts_compute_the_result_of_single_experts(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    experts = stack(kind).to(dtype)
    tokens = torch.randn(sum(SIZES), DIM, dtype=dtype, requires_grad=True)
    ends = torch.tensor(SIZES).cumsum(0).to(torch.int32)
    got = experts(tokens, ends)
    wanted = torch.cat([one_expert(experts, row, part) for row, part in enumerate(tokens.split(SIZES))])
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
    leaves = [tokens, *experts.parameters()]
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (got, wanted)]
    for mine, plain in zip(*grads, strict=True):
        assert (mine - plain).abs().max() <= 10 * tolerance * max(float(plain.abs().max()), 1.0)
    assert all((grad[1] == 0).all() for grad in grads[0][1:]), "the expert without tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_pass_works_without_tokens(kind: str) -> None:
    tokens = torch.empty(0, DIM, requires_grad=True)
    out = stack(kind)(tokens, torch.zeros(EXPERTS, dtype=torch.int32))
    assert out.shape == (0, DIM)
    out.sum().backward()
    assert tokens.grad is not None


def test_modules_are_a_pure_function_of_seed_layer_and_number() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = ModuleExperts(Squared, DIM, HIDDEN, 2, seed=5, layer=1)
    assert torch.equal(torch.get_rng_state(), before), "initialisation must not draw from the global generator"
    same = ModuleExperts(Squared, DIM, HIDDEN, 3, seed=5, layer=1)
    other = ModuleExperts(Squared, DIM, HIDDEN, 2, seed=5, layer=2)
    name = "net-0-weight"
    assert torch.equal(first.weights()[name], same.weights()[name][:2])
    assert not torch.equal(first.weights()[name], other.weights()[name])
    assert not torch.equal(first.weights()[name][0], first.weights()[name][1])
    assert list(first.state_dict()) == list(first.weights())


class Buffered(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.line = nn.Linear(dim, dim)
        self.register_buffer("seen", torch.zeros(()))


class Growing(nn.Module):
    made = 0

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        Growing.made += 1
        self.line = nn.Linear(dim, dim, bias=Growing.made > 1)


ONE = nn.Linear(DIM, DIM)


@pytest.mark.parametrize(
    ("factory", "error"),
    [
        (lambda dim, hidden: nn.ReLU(), r"expert \(ReLU\) has no parameters"),
        (Buffered, "has the buffer 'seen'"),
        (lambda dim, hidden: nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.1)), r"random numbers \(Dropout\)"),
        (Growing, "not alike: the parameters of expert 1"),
        (nn.Linear(DIM, DIM), r"expert is the module Linear: give a factory"),
        ("linear", "expert is 'linear': give a factory"),
        (lambda dim, hidden: None, r"expert\(dim, hidden\) returned None: it must return a module"),
        (lambda dim, hidden: ONE, "experts 0 and 1 of the factory share the parameter 'weight'"),
        (lambda dim, hidden: nn.Sequential(nn.Linear(dim, dim), ONE), "share the parameter '1.weight'"),
    ],
)
def test_invalid_expert_modules_are_refused(factory: Any, error: str) -> None:
    with pytest.raises(BadInputError, match=error):
        ModuleExperts(factory, DIM, HIDDEN, 2, seed=1, layer=0)


def test_an_expert_that_returns_another_shape_is_refused() -> None:
    experts = ModuleExperts(lambda dim, hidden: nn.Linear(dim, hidden), DIM, HIDDEN, 2, seed=1, layer=0)
    with pytest.raises(BadInputError, match=r"\(Linear\) returned \(3, 12\) for tokens of shape \(3, 8\)"):
        experts(torch.randn(3, DIM), torch.tensor([0, 3], dtype=torch.int32))


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        (((3, 8, 12), (4, 12, 8), (3, 12), (3, 8)), torch.float32),
        (((3, 8, 12), (3, 12, 7), (3, 12), (3, 8)), torch.float32),
        (((3, 8, 12), (3, 11, 8), (3, 12), (3, 8)), torch.float32),
        (((3, 8, 12), (3, 12, 8), (3, 11), (3, 8)), torch.float32),
        (((3, 8, 12), (3, 12, 8), (3, 12), (8,)), torch.float32),
        (((8, 12), (12, 8), (12,), (8,)), torch.float32),
        (((3, 8, 12), (3, 12, 8), (3, 12), (3, 8)), torch.float16),
    ],
)
def test_weights_that_do_not_match_are_refused(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    w1, w2, b1, b2 = (nn.Parameter(torch.zeros(shape)) for shape in shapes)
    b2 = nn.Parameter(b2.detach().to(dtype))
    with pytest.raises(BadInputError, match="the experts' weights do not match: w1"):
        StackedExperts(w1, w2, F.gelu, b1=b1, b2=b2)
