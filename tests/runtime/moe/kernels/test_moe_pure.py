"""The pure functions: which rank sends which row, which one sums, and which one saves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import EXPERTS, random_placement

from holdfast.runtime.moe.expert_shards.saving import assign_savers
from holdfast.runtime.moe.expert_shards.shares import group_items
from holdfast.runtime.moe.hosts import Placement, count_layer_replicas
from holdfast.runtime.moe.kernels.dispatch import invert_order

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)


PLACEMENTS = st.builds(random_placement, st.integers(0, 2**32 - 1).map(np.random.default_rng), st.integers(1, 5))


@PROPERTY
@given(st.permutations(range(9)))
def test_invert_order_undoes_an_order(order) -> None:  # type: ignore[no-untyped-def]
    array = np.array(order)
    assert array[invert_order(array)].tolist() == list(range(9))


@PROPERTY
@given(PLACEMENTS, st.integers(1, 200))
def test_every_gradient_element_has_one_owner_among_the_hosts(placement: Placement, numel: int) -> None:
    found = group_items(placement, [{"w1": numel, "w2": 16}] * len(placement))
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
    saved = assign_savers(placement, EXPERTS)
    pairs = [pair for mine in saved for pair in mine]
    assert sorted(pairs) == [(layer, expert) for layer, experts in enumerate(EXPERTS) for expert in range(experts)]
    assert all(expert in placement[layer][rank] for rank, mine in enumerate(saved) for layer, expert in mine)


def test_savers_share_the_work_evenly() -> None:
    everywhere = [[0, 1, 2, 3, 4, 5, 6, 7]] * 4
    assert [len(mine) for mine in assign_savers([everywhere], (8,))] == [2, 2, 2, 2]


def test_a_placement_without_an_expert_is_refused() -> None:
    with pytest.raises(ValueError, match=r"experts \[1\] live on no rank"):
        count_layer_replicas([[0], [2]], 3)
    with pytest.raises(ValueError, match=r"outside 0\.\.1"):
        count_layer_replicas([[0, 1], [2]], 2)
