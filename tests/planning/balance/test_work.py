"""The busiest node's work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import PROPERTY, problems

from holdfast.planning import strategy_named
from holdfast.planning.balance.work import busiest_over_mean, busiest_tokens, work_per_replica

COUNTS = np.array([[[2, 0], [0, 1], [0, 1]]])


def test_replicas_share_their_experts_tokens():
    loads = np.array([[8.0, 3.0, 2.0]])
    np.testing.assert_array_equal(work_per_replica(loads, COUNTS.sum(axis=2)), [[4.0, 3.0, 2.0]])
    np.testing.assert_array_equal(busiest_tokens(COUNTS, loads), [8.0])
    np.testing.assert_allclose(busiest_over_mean(COUNTS, loads), [8.0 / 6.5])


@PROPERTY
@given(problem=problems(), seed=st.integers(0, 99))
def test_the_busiest_node_is_the_one_with_the_most_shares(problem, seed):
    counts = strategy_named("spread").place(problem)
    loads = np.random.default_rng(seed).random(problem.replicas.shape)
    for layer, found in enumerate(busiest_tokens(counts, loads)):
        shares = loads[layer] / problem.replicas[layer]
        assert found == pytest.approx(max(shares @ counts[layer][:, node] for node in range(problem.nodes)))


def test_an_expert_without_a_host_has_infinite_work_and_no_load_is_even():
    nowhere = COUNTS.copy()
    nowhere[0, 2] = 0
    assert np.isinf(busiest_tokens(nowhere, np.array([[1.0, 1.0, 1.0]]))).all()
    np.testing.assert_array_equal(busiest_over_mean(nowhere, np.zeros((1, 3))), [1.0])
