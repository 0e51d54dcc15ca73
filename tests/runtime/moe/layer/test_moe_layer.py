"""The layer alone, and its behaviour in a failing step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from moe_cases import EXPERTS, LAYERS, batch, bound, loss_of, settle, small_model
from torch import nn
from torch.nn import functional as F

from holdfast.errors import BadInputError
from holdfast.runtime.groups.communicator import Communicator, HaltedError, LocalCommunicator, Pending
from holdfast.runtime.moe.expert_shards.binding import bind_layers, dense_parameters
from holdfast.runtime.moe.expert_shards.shards import ExpertShards
from holdfast.runtime.moe.experts.stack import draw_experts
from holdfast.runtime.moe.gates.gate import Choice, TopKGate
from holdfast.runtime.moe.gates.routing import RecordedRouting
from holdfast.runtime.moe.hosts import place_everywhere
from holdfast.runtime.moe.layer.expert_layer import ElasticExperts, expert_parameters, moe_layers, serve_round
from holdfast.runtime.moe.layer.moe_layer import MoE


def plainly(layer: MoE, tokens_TD: torch.Tensor) -> torch.Tensor:
    """Compute the layer token by token."""
    probabilities = (tokens_TD @ layer.router.weight.T).softmax(-1)
    out = []
    for token, row in zip(tokens_TD, probabilities, strict=True):
        chosen = row.topk(layer.top_k).indices
        weights = row[chosen] if layer.top_k == 1 else row[chosen] / row[chosen].sum()
        parts = [F.gelu(token @ layer.experts.w1[e]) @ layer.experts.w2[e] for e in chosen]
        out.append(sum(w * part for w, part in zip(weights, parts, strict=True)))
    return torch.stack(out)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_a_layer_on_one_rank_computes_the_weighted_sum_of_its_experts(
    top_k: int, dtype: torch.dtype, tolerance: float
) -> None:
    layer = MoE(8, 16, 5, top_k, seed=1).to(dtype)
    tokens = torch.randn(4, 6, 8, dtype=dtype, requires_grad=True)
    got, wanted = layer(tokens), plainly(layer, tokens.view(-1, 8)).view(4, 6, 8)
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
    leaves = [tokens, *layer.parameters()]
    # sum() passes an expanded gradient, which must work as well.
    for mine, plain in zip(
        torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves), strict=True
    ):
        assert (mine - plain).abs().max() <= tolerance * max(float(plain.abs().max()), 1.0)


def test_odd_sizes_and_no_tokens_work() -> None:
    layer = MoE(5, 7, 3, 2, seed=1)
    tokens = torch.randn(9, 5)
    assert torch.allclose(layer(tokens), plainly(layer, tokens), atol=1e-6)
    none = layer(torch.empty(0, 5))
    assert none.shape == (0, 5)
    none.sum().backward()


def test_experts_are_a_pure_function_of_seed_layer_and_number() -> None:
    first, same = MoE(8, 16, 4, seed=5, layer=1), MoE(8, 16, 6, seed=5, layer=1)
    assert torch.equal(first.experts.w1, same.experts.w1[:4])
    assert not torch.equal(first.experts.w1, MoE(8, 16, 4, seed=5, layer=2).experts.w1)
    assert not torch.equal(first.experts.w1[0], first.experts.w1[1])
    torch.manual_seed(3)
    drawn = MoE(8, 16, 4)
    torch.manual_seed(3)
    assert torch.equal(MoE(8, 16, 4).experts.w1, drawn.experts.w1)


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (8, 16, 4, 5), (8, 16, 4, 0), (8, 16, 0, 1)])
def test_invalid_sizes_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(BadInputError, match="MoE"):
        MoE(*sizes)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0: it must be above 0"),
        ({"capacity_factor": float("nan")}, "capacity_factor is nan"),
        ({"gate": TopKGate(4, 2), "aux_loss": 0.1}, "aux_loss=0.1 is the default gate's"),
        ({"expert": nn.Linear, "gated": True}, "leave them out, or expert"),
        ({"dispatch": "anyhow"}, "anyhow"),
        ({"capacity_factor": "1"}, "capacity_factor is '1': it must be a number"),
        ({"jitter": "0.1"}, "jitter is '0.1': it must be a number"),
        ({"aux_loss": "0.1"}, "aux_loss is '0.1': it must be a number"),
        ({"activation": "gelu"}, "activation is 'gelu': it must be a function"),
        ({"activation": ""}, "activation is '': it must be a function"),
        ({"top_k": 2.0}, "top_k is 2.0: it must be a whole number"),
        ({"top_k": True}, "top_k is True: it must be a whole number"),
        ({"seed": "1"}, "seed is '1': it must be a whole number"),
        ({"layer": 1.0}, "layer is 1.0: it must be a whole number"),
        ({"layer": -1}, "layer is -1: it must be 0 or more"),
        ({"layer": 1 << 64}, "it must be 0 or more, and below 4294967296"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(BadInputError, match=error):
        MoE(8, 16, 4, **options)


@pytest.mark.parametrize("name", ["dim", "hidden", "experts"])
def test_sizes_that_are_not_integers_are_refused(name: str) -> None:
    sizes: dict[str, Any] = {"dim": 8, "hidden": 16, "experts": 4}
    with pytest.raises(BadInputError, match=f"{name} is 8.0: it must be a whole number"):
        MoE(**{**sizes, name: 8.0})
    ours, numpys = (MoE(**{**sizes, name: kind(8)}, seed=kind(1 << 61), layer=kind(3)) for kind in (int, np.int64))
    assert torch.equal(numpys(torch.ones(1, 8)), ours(torch.ones(1, 8)))
    assert type(numpys.experts.dim) is type(numpys.experts.experts) is type(numpys.top_k) is int


class OwnGate(nn.Module):
    """A gate that chooses the lowest logits, with a learnable weight."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, logits: torch.Tensor) -> Choice:
        chosen = logits.argmin(1, keepdim=True)
        return Choice(
            experts=chosen + self.experts, weights=self.weight.expand(len(logits), 1), aux_loss=logits.new_zeros(())
        )


def test_a_custom_gate_chooses_the_experts() -> None:
    layer = MoE(8, 16, 4, 1, gate=OwnGate(0), shared=nn.Linear(8, 8), seed=1)
    tokens = torch.randn(3, 8)
    wanted = []
    for token in tokens:
        expert = int((layer.router.weight @ token).argmin())
        routed = F.gelu(token @ layer.experts.w1[expert]) @ layer.experts.w2[expert]
        wanted.append(routed + layer.shared(token))  # type: ignore[misc]
    out = layer(tokens)
    assert torch.allclose(out, torch.stack(wanted), atol=1e-6)
    out.sum().backward()
    assert layer.gate.weight.grad is not None


def test_an_invalid_choice_of_a_custom_gate_is_refused() -> None:
    with pytest.raises(BadInputError, match="the gate OwnGate chose expert"):
        MoE(8, 16, 4, 1, gate=OwnGate(4), seed=1)(torch.randn(3, 8))
    with pytest.raises(BadInputError, match=r"experts \(3, 1\)"):
        MoE(8, 16, 4, 2, gate=OwnGate(0), seed=1)(torch.randn(3, 8))


@pytest.mark.parametrize(
    ("options", "tokens", "error"),
    [
        ({}, torch.zeros(3, 9), r"tokens \(3, 9\) of torch.float32: they must be \(..., 8\)"),
        ({}, torch.zeros(()), r"tokens \(\) of"),
        ({}, torch.zeros(3, 8, dtype=torch.int64), "of torch.int64: .* floating-point"),
        ({"gate": TopKGate(6, 2)}, torch.zeros(3, 8), "TopKGate is for 6 experts, but the router has 4"),
        ({"shared": nn.Linear(8, 1)}, torch.zeros(3, 8), r"module Linear returned \(3, 1\) for tokens \(3, 8\)"),
    ],
)
def test_inputs_that_do_not_fit_the_layer_are_refused(
    options: dict[str, Any], tokens: torch.Tensor, error: str
) -> None:
    with pytest.raises(BadInputError, match=error):
        MoE(8, 16, 4, 2, **options)(tokens)


def test_elastic_experts_follow_the_models_own_router() -> None:
    stack = draw_experts(8, 16, 4, F.gelu, gate=False, seed=1, layer=0)
    experts, tokens = ElasticExperts(stack), torch.randn(2, 8)
    out = experts(tokens, torch.tensor([[3, 0], [1, 2]]), torch.tensor([[0.5, 0.25], [1.0, 2.0]]))
    parts = F.gelu(tokens @ stack.w1) @ stack.w2  # (experts, tokens, dim)
    assert torch.allclose(out[0], 0.5 * parts[3, 0] + 0.25 * parts[0, 0], atol=1e-6)
    assert torch.allclose(out[1], parts[1, 1] + 2.0 * parts[2, 1], atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "chosen", "weights"),
    [((2, 7), (2, 1), (2, 1)), ((2, 8), (3, 1), (3, 1)), ((2, 8), (2, 1), (2, 2)), ((1, 2, 8), (1, 2, 1), (1, 2, 1))],
)
def test_elastic_experts_refuse_other_shapes(
    tokens: tuple[int, ...], chosen: tuple[int, ...], weights: tuple[int, ...]
) -> None:
    experts = ElasticExperts(draw_experts(8, 16, 4, F.gelu, gate=False, seed=1, layer=0))
    with pytest.raises(BadInputError, match=r"they must be \(T, 8\), \(T, K\) and \(T, K\)"):
        experts(torch.ones(tokens), torch.zeros(chosen, dtype=torch.int64), torch.ones(weights))


def test_elastic_experts_refuse_an_expert_number_out_of_range() -> None:
    experts = ElasticExperts(draw_experts(8, 16, 4, F.gelu, gate=False, seed=1, layer=0))
    with pytest.raises(BadInputError, match="chose expert 4: there are 4 experts, 0 to 3"):
        experts(torch.ones(1, 8), torch.tensor([[4]]), torch.ones(1, 1))


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.0])
def test_a_capacity_prefers_first_choices_and_earlier_tokens(factor: float) -> None:
    layer = MoE(8, 16, 5, 2, seed=1, capacity_factor=factor).double()
    tokens = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    choice = layer.gate(layer.router(tokens))
    room, taken, wanted = math.ceil(factor * 40 / 5), [0] * 5, torch.zeros(20, 8, dtype=torch.float64)
    for rank in range(2):
        for token in range(20):
            expert = int(choice.experts[token, rank])
            taken[expert] += 1
            if taken[expert] <= room:
                part = F.gelu(tokens[token] @ layer.experts.w1[expert]) @ layer.experts.w2[expert]
                wanted = wanted.index_add(0, torch.tensor([token]), (choice.weights[token, rank] * part).unsqueeze(0))
    got = layer(tokens)
    assert (got - wanted).abs().max() < 1e-14
    leaves = [tokens, *layer.parameters()]
    for mine, plain in zip(
        torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves), strict=True
    ):
        assert (mine - plain).abs().max() < 1e-13
    assert layer.binding.state.loads[0].tolist() == [min(count, room) for count in taken]
    assert layer(tokens[:0]).shape == (0, 8)


def test_autocast_computes_in_bf16_and_keeps_fp32_parameters() -> None:
    layer = MoE(16, 32, 4, 2, seed=1)
    tokens = torch.randn(10, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = layer(tokens)
    full = layer(tokens)
    assert half.dtype == torch.float32
    assert not torch.equal(half, full)
    assert (half - full).abs().max() < 0.03 * full.abs().max()
    half.sum().backward()
    assert layer.experts.w1.grad is not None
    assert layer.experts.w1.grad.dtype == torch.float32


def test_loads_are_counted() -> None:
    layer = MoE(8, 16, 4, 2, seed=1, routing=RecordedRouting([[0, 2]]))
    layer(torch.randn(3, 8))
    layer(torch.randn(2, 8))
    assert layer.binding.state.loads[0].tolist() == [5, 0, 5, 0]


def test_dense_and_expert_parameters_are_distinguished() -> None:
    model = small_model()
    experts, dense = expert_parameters(model), dense_parameters(model)
    assert len(experts) == 2 * len(LAYERS)
    assert {id(p) for p in experts} | {id(p) for p in dense} == {id(p) for p in model.parameters()}
    assert not {id(p) for p in experts} & {id(p) for p in dense}


def test_a_binding_that_does_not_fit_is_refused() -> None:
    model = small_model()
    layers, comm = moe_layers(model), LocalCommunicator()
    settle(ExpertShards(layers), (((0, 1),), ((0, 1, 2),)), 0)
    with pytest.raises(ValueError, match="but its placement has"):
        bind_layers(layers, comm, place_everywhere(EXPERTS, 1))
    with pytest.raises(ValueError, match="does not fit a group of 1"):
        bind_layers(layers, comm, place_everywhere(EXPERTS, 2))


class Halting(Communicator):
    """Rank 0 of two that both host everything, with a peer that only serves; halted in the n-th operation."""

    def __init__(self, halt_at: int) -> None:
        super().__init__(rank=0, size=2)
        self.started = 0
        self.halt_at = halt_at

    def start_all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        self.started += 1
        output.zero_()
        output[0], output[input.numel()] = input[0], input[0]
        output[: input.numel()].copy_(input)
        return Pending("all_gather", None)

    def start_all_to_all(self, output: torch.Tensor, input: torch.Tensor, *splits: Any) -> Pending:
        self.started += 1
        if self.started == self.halt_at:
            output.fill_(float("nan"))  # An abandoned operation may do this to its buffer.
        elif output.numel():
            output.zero_()
            output[: min(len(input), len(output))].copy_(input[: len(output)])
        return Pending("all_to_all", None)

    def wait(self, pending: Pending) -> None:
        if self.started >= self.halt_at:
            raise HaltedError("halted here")


PER_LAYER = 5  # counts, tokens, results, and the two gradients


@pytest.mark.parametrize("halt_at", range(1, PER_LAYER * len(LAYERS) + 2))
def test_a_halt_raises_no_error_in_the_training_loop(halt_at: int) -> None:
    model, comm = small_model(), Halting(halt_at)
    # Both ranks host everything, so this rank's own tokens stay here.
    state, gradients = bound(comm, model, place_everywhere(EXPERTS, 2))
    whole = halt_at > PER_LAYER * len(LAYERS)
    state.start_micro_batch(1, 0)
    loss = loss_of(model, batch(1, 0))
    loss.backward()
    gradients.collect()
    assert loss.isfinite()
    assert (state.void is None) == whole
    assert comm.started == min(halt_at, PER_LAYER * len(LAYERS))
    for number in (1, 2):
        state.start_micro_batch(1, number)
        if not whole:
            # No more tokens are sent from now on.
            loss_of(model, batch(1, number)).backward()
            serve_round(moe_layers(model))
    if not whole:
        assert isinstance(state.void, HaltedError)
        assert state.void.__traceback__ is None
        assert comm.started == halt_at
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_a_loss_that_omits_a_layer_is_refused() -> None:
    model = small_model()
    state, _ = bound(Halting(1000), model, place_everywhere(EXPERTS, 2))
    layers = moe_layers(model)
    state.start_micro_batch(1, 0)
    hidden = layers[0](batch(1, 0))
    layers[1](hidden.detach())
    hidden.sum().backward()
    with pytest.raises(BadInputError, match="made 6 of 8 token exchanges"):
        state.finish_micro_batch()
    state.start_micro_batch(1, 1)
    loss_of(model, batch(1, 1)).backward()
    state.finish_micro_batch()


def test_layers_called_out_of_order_are_refused() -> None:
    model = small_model()
    state, _ = bound(Halting(1000), model, place_everywhere(EXPERTS, 2))
    state.start_micro_batch(1, 0)
    layers = moe_layers(model)
    with pytest.raises(BadInputError, match="layer 1 is called, but layer 0 is next"):
        layers[1](batch(1, 0))
    layers[0](batch(1, 0))
    with pytest.raises(BadInputError, match="layer 0 is called, but layer 1 is next"):
        layers[0](batch(1, 0))
