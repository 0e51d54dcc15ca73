"""The pure parts: who sends which row where, who sums and who saves what, fixed routing, the gate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import EXPERTS, random_placement

from holdfast.errors import BadInputError
from holdfast.runtime.moe.holding.hosts import Placement, replicas_of
from holdfast.runtime.moe.holding.saving import savers
from holdfast.runtime.moe.holding.shares import families
from holdfast.runtime.moe.kernels.dispatch import inverse
from holdfast.runtime.moe.layer.gate import Gate
from holdfast.runtime.moe.layer.routing import RecordedRouting, routing_from_loads

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)


PLACEMENTS = st.builds(random_placement, st.integers(0, 2**32 - 1).map(np.random.default_rng), st.integers(1, 5))


@PROPERTY
@given(st.permutations(range(9)))
def test_inverse_undoes_an_order(order) -> None:  # type: ignore[no-untyped-def]
    array = np.array(order)
    assert array[inverse(array)].tolist() == list(range(9))


@PROPERTY
@given(PLACEMENTS, st.integers(1, 200))
def test_every_gradient_element_has_one_owner_among_the_hosts(placement: Placement, numel: int) -> None:
    found = families(placement, [{"w1": numel, "w2": 16}] * len(placement))
    assert sorted({(item.layer, item.expert, item.weight) for family in found for item in family.items}) == [
        (layer, expert, weight)
        for layer, experts in enumerate(EXPERTS)
        for expert in range(experts)
        for weight in ("w1", "w2")
    ]
    for family in found:
        for item in family.items:
            hosts = [rank for rank, mine in enumerate(placement[item.layer]) if item.expert in mine]
            assert list(family.hosts) == hosts
            covered = [place for rank in family.hosts for place in range(item.numel)[family.shard(item, rank)]]
            assert covered == list(range(item.numel))
        lengths = sum(family.shard_length(rank) for rank in family.hosts)
        assert lengths == sum(item.numel for item in family.items)


@PROPERTY
@given(PLACEMENTS)
def test_every_expert_is_saved_once_by_a_host(placement: Placement) -> None:
    saved = savers(placement, EXPERTS)
    pairs = [pair for mine in saved for pair in mine]
    assert sorted(pairs) == [(layer, expert) for layer, experts in enumerate(EXPERTS) for expert in range(experts)]
    assert all(expert in placement[layer][rank] for rank, mine in enumerate(saved) for layer, expert in mine)


def test_savers_share_the_work_evenly() -> None:
    everywhere = [[0, 1, 2, 3, 4, 5, 6, 7]] * 4
    assert [len(mine) for mine in savers([everywhere], (8,))] == [2, 2, 2, 2]


def test_a_placement_without_an_expert_is_refused() -> None:
    with pytest.raises(ValueError, match=r"experts \[1\] live on no rank"):
        replicas_of([[0], [2]], 3)
    with pytest.raises(ValueError, match=r"outside 0\.\.1"):
        replicas_of([[0, 1], [2]], 2)


def test_recorded_routing_depends_on_step_micro_batch_and_position_only() -> None:
    table = [[row % 5, (row + 1) % 5] for row in range(50)]
    routing = RecordedRouting(table, seed=3)
    first = routing.assign(4, 2, 70)
    assert first.shape == (70, 2)
    assert torch.equal(first, routing.assign(4, 2, 70))
    assert torch.equal(first[:20], routing.assign(4, 2, 20))
    assert torch.equal(first[:20], first[50:])
    assert any(not torch.equal(first, routing.assign(4, other, 70)) for other in (0, 1, 3, 4))


@pytest.mark.parametrize("table", [[[0, 0]], [[-1, 0]], [0, 1], [[0.5, 1.0]], []])
def test_recorded_routing_refuses_what_is_no_routing(table: list) -> None:  # type: ignore[type-arg]
    with pytest.raises(BadInputError, match="recorded routing"):
        RecordedRouting(table)


def test_routing_from_loads_follows_the_loads() -> None:
    loads = np.array([500.0, 100.0, 0.0, 400.0])
    ids = routing_from_loads(loads, 1, rows=8000, seed=1).assign(1, 0, 8000)
    shares = torch.bincount(ids.reshape(-1), minlength=4).numpy() / 8000
    # Binomial: five standard deviations of 8000 draws are 0.028 at most.
    assert np.abs(shares - loads / 1000).max() < 0.028
    assert shares[2] == 0.0
    pairs = routing_from_loads(loads, 2, seed=1).assign(1, 0, 100)
    assert (pairs[:, 0] != pairs[:, 1]).all()


@pytest.mark.parametrize("loads", [[1.0], [1.0, -1.0], [1.0, float("nan")], [[1.0, 2.0]]])
def test_routing_from_loads_refuses_bad_loads(loads: list) -> None:  # type: ignore[type-arg]
    with pytest.raises(BadInputError, match="loads"):
        routing_from_loads(loads, 2)


def gate(top_k: int, aux_loss: float = 0.0) -> Gate:
    return Gate(8, 4, top_k, aux_loss, torch.Generator().manual_seed(0))


def test_gate_weights_are_normalised_but_for_one_expert_per_token() -> None:
    tokens = torch.randn(16, 8)
    two = gate(2)(tokens)
    assert torch.allclose(two.weights.sum(1), torch.ones(16))
    one = gate(1)(tokens)
    assert torch.allclose(one.weights[:, 0], (tokens @ gate(1).weight.T).softmax(1).max(1).values)
    one.weights.sum().backward()


def test_a_fixed_choice_keeps_the_gates_weights() -> None:
    tokens, module = torch.randn(6, 8), gate(2)
    chosen = torch.tensor([[3, 1]] * 6)
    choice = module(tokens, chosen)
    probabilities = (tokens @ module.weight.T).softmax(1)[:, [3, 1]]
    assert torch.equal(choice.experts, chosen)
    assert torch.allclose(choice.weights, probabilities / probabilities.sum(1, keepdim=True))


def test_the_balancing_loss_is_least_for_an_even_load() -> None:
    tokens = torch.randn(400, 8)
    module = gate(1, aux_loss=0.5)
    with torch.no_grad():
        module.weight.zero_()
    even = torch.arange(400).reshape(-1, 1) % 4
    # Even probabilities: E x sum(1/E x share) = 1, whatever the shares.
    assert module(tokens, even).aux_loss.item() == pytest.approx(0.5)
    with torch.no_grad():
        module.weight[2] += 50 * tokens[0]
    skewed = module(tokens[:1], torch.tensor([[2]])).aux_loss
    assert skewed.item() == pytest.approx(2.0)
    assert gate(1)(tokens).aux_loss.item() == 0.0
