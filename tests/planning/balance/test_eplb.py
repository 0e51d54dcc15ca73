"""Our EPLB: the published example, the guaranteed shapes, and how even the result is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import PROPERTY

from holdfast.planning.balance.eplb import EplbShape, eplb


def test_the_result_equals_the_published_example() -> None:
    # The example of EPLB's page: 2 layers, 12 experts in 4 groups, 16 replicas on 2 nodes of 4 GPUs.
    loads = np.array(
        [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]],
        dtype=np.float64,
    )
    shape = EplbShape(replicas=16, groups=4, nodes=2, gpus=8)
    assert eplb(loads, shape).tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


@PROPERTY
@given(
    nodes=st.integers(1, 4),
    gpus=st.integers(1, 3),
    per_group=st.integers(1, 4),
    groups=st.integers(1, 8),
    extra=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_every_expert_has_a_slot_and_every_slot_an_expert(nodes, gpus, per_group, groups, extra, seed):
    experts = groups * per_group
    slots = -(-experts // (nodes * gpus)) * nodes * gpus + extra * nodes * gpus
    shape = EplbShape(replicas=slots, groups=groups, nodes=nodes, gpus=nodes * gpus)
    loads = np.random.default_rng(seed).pareto(1.2, (2, experts))
    placed = eplb(loads, shape)
    assert placed.shape == (2, slots)
    assert all(set(row) == set(range(experts)) for row in placed.tolist())
    if shape.hierarchical:
        # Groups are whole: each expert's replicas are within one node.
        homes = np.repeat(np.arange(nodes), slots // nodes)
        assert all(len(set(homes[row == expert])) == 1 for row in placed for expert in range(experts))


@pytest.mark.parametrize(("groups", "at_most"), [(1, 1.01), (8, 1.2)])
def test_gpus_get_almost_the_same_work(groups, at_most):
    loads = np.random.default_rng(3).uniform(1, 9, (4, 96))
    placed = eplb(loads, EplbShape(replicas=128, groups=groups, nodes=4, gpus=8))
    number = np.stack([np.bincount(row, minlength=96) for row in placed])
    work = np.take_along_axis(loads / number, placed, axis=1).reshape(4, 8, 16).sum(axis=2)
    assert (work.max(axis=1) / work.mean(axis=1)).max() < at_most
