"""Token dispatch: every token is sent once, no replica exceeds its share, and near replicas come first."""

from __future__ import annotations

from itertools import combinations, product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import PROPERTY, tables

from holdfast.errors import BadInputError
from holdfast.planning import (
    Interval,
    MinMax,
    NodeInterval,
    Proportional,
    dispatch_schedule,
    minmax_capacities,
    replica_capacities,
)
from holdfast.planning.dispatch import schedule as dispatch_module


@st.composite
def cases(draw, most_ranks=8, most_tokens=30):
    experts, ranks = draw(st.integers(1, 5)), draw(st.integers(1, most_ranks))
    replicas = draw(tables(experts, ranks, 3))
    replicas[np.arange(experts), draw(st.integers(0, ranks - 1))] += 1
    return draw(tables(experts, ranks, most_tokens)), replicas


def schemes(ranks):
    return Interval(), Proportional(), NodeInterval(np.arange(ranks) // 2), MinMax()


def matrix(schedule, ranks):
    return np.stack([schedule.send_row(rank) for rank in range(ranks)], axis=1)


@PROPERTY
@given(cases())
def test_every_token_is_sent_once_and_local_replicas_come_first(case):
    tokens, replicas = case
    ranks = tokens.shape[1]
    for scheme in schemes(ranks):
        schedule = dispatch_schedule(tokens, replicas, scheme)
        sent = matrix(schedule, ranks)
        got = np.stack([schedule.receive_column(rank) for rank in range(ranks)], axis=2)
        np.testing.assert_array_equal(sent, got)
        assert (sent >= 0).all()
        np.testing.assert_array_equal(sent.sum(axis=2), tokens)
        np.testing.assert_array_equal(sent.sum(axis=1), schedule.capacities)
        stays = sent[:, np.arange(ranks), np.arange(ranks)]
        np.testing.assert_array_equal(stays, np.minimum(tokens, schedule.capacities))


@PROPERTY
@given(cases())
def test_wide_tables_and_blocks_of_experts_change_nothing(case):
    tokens, replicas = case
    ranks = tokens.shape[1]
    for scheme in schemes(ranks):
        schedule = dispatch_schedule(tokens, replicas, scheme)
        with patch.multiple(dispatch_module, _MOST_IN_32_BITS=-1, _BLOCK=2 * ranks):
            other = dispatch_schedule(tokens, replicas, scheme)
        assert other.capacities.dtype == np.int64
        np.testing.assert_array_equal(schedule.capacities, other.capacities)
        for rank in range(ranks):
            np.testing.assert_array_equal(schedule.send_row(rank), other.send_row(rank))
            np.testing.assert_array_equal(schedule.receive_column(rank), other.receive_column(rank))


@PROPERTY
@given(cases(), st.integers((1 << 29) - 100, (1 << 31) + 100))
def test_numbers_around_32_bits_are_exact(case, many):
    tokens, replicas = case
    tokens = tokens + (tokens > 15) * many
    for scheme in schemes(tokens.shape[1])[:3]:
        schedule = dispatch_schedule(tokens, replicas, scheme)
        sent = matrix(schedule, tokens.shape[1])
        assert (sent >= 0).all()
        np.testing.assert_array_equal(sent.sum(axis=2), tokens)
        np.testing.assert_array_equal(sent.sum(axis=1), schedule.capacities)


@PROPERTY
@given(cases())
def test_no_replica_computes_more_than_its_share(case):
    tokens, replicas = case
    share = -(-tokens.sum(axis=1) // replicas.sum(axis=1))
    capacities = replica_capacities(tokens, replicas)
    assert (capacities <= replicas * share[:, None]).all()
    floor = tokens.sum(axis=1) // replicas.sum(axis=1)
    assert (capacities >= replicas * floor[:, None]).all()


@PROPERTY
@given(cases())
def test_the_node_interval_sends_as_many_tokens_as_possible_within_nodes(case):
    tokens, replicas = case
    ranks = tokens.shape[1]
    node_of = np.arange(ranks) // 2
    schedule = dispatch_schedule(tokens, replicas, NodeInterval(node_of))
    same = node_of[:, None] == node_of[None, :]
    inside = (matrix(schedule, ranks) * same).sum(axis=(1, 2))
    possible = sum(
        np.minimum(tokens[:, node_of == node].sum(axis=1), schedule.capacities[:, node_of == node].sum(axis=1))
        for node in range(node_of[-1] + 1)
    )
    np.testing.assert_array_equal(inside, possible)


@PROPERTY
@given(cases())
def test_interval_needs_fewer_than_two_messages_per_rank_and_expert(case):
    tokens, replicas = case
    ranks = tokens.shape[1]
    sent = matrix(dispatch_schedule(tokens, replicas, Interval()), ranks)
    messages = (sent * ~np.eye(ranks, dtype=bool) > 0).sum(axis=(1, 2))
    assert (messages <= np.maximum(ranks - 1, 0)).all()


@PROPERTY
@given(cases(most_tokens=3000))
def test_proportional_stays_close_to_algorithm_1(case):
    """Each share is proportional (Algorithm 1, line 12) except for the part in two cut piles."""
    tokens, replicas = case
    ranks = tokens.shape[1]
    capacities = replica_capacities(tokens, replicas)
    surplus, free = np.maximum(tokens - capacities, 0), np.maximum(capacities - tokens, 0)
    total = np.maximum(surplus.sum(axis=1), 1)[:, None, None]
    exact = surplus[:, :, None] * free[:, None, :] / total
    sent = matrix(dispatch_schedule(tokens, replicas, Proportional()), ranks)
    sent[:, np.arange(ranks), np.arange(ranks)] -= np.minimum(tokens, capacities)
    piles = np.maximum((free > 0).sum(axis=1), 1)[:, None, None]
    assert (np.abs(sent - exact) <= 2 * surplus[:, :, None] / piles + 4).all()


def test_proportional_splits_evenly_over_equal_hosts():
    tokens = np.array([[400, 400, 0, 0, 0, 0]])
    replicas = np.array([[0, 0, 1, 1, 1, 1]])
    row = dispatch_schedule(tokens, replicas, Proportional()).send_row(0)
    assert row.tolist() == [[0, 0, 100, 100, 100, 100]]
    row = dispatch_schedule(tokens, replicas, Interval()).send_row(0)
    assert row.tolist() == [[0, 0, 200, 200, 0, 0]]


def test_remaining_tokens_are_spread_over_the_ranks():
    tokens = np.full((64, 4), 1)
    tokens[:, 3] = 2
    capacities = replica_capacities(tokens, np.ones((64, 4), dtype=int))
    assert capacities.sum(axis=0).tolist() == [64, 64, 64, 128]
    tokens = np.array([[5, 0, 0]] * 9)
    assert replica_capacities(tokens, np.ones((9, 3), dtype=int)).sum(axis=0).tolist() == [18, 15, 12]


@PROPERTY
@given(cases(most_ranks=3, most_tokens=3))
def test_minmax_reaches_the_least_busiest_rank(case):
    tokens, replicas = case
    tokens, replicas = tokens[:2], replicas[:2]
    capacities = minmax_capacities(tokens, replicas)
    np.testing.assert_array_equal(capacities.sum(axis=1), tokens.sum(axis=1))
    assert (capacities[replicas == 0] == 0).all()
    ranks = tokens.shape[1]
    options = [
        [
            split
            for split in product(range(total + 1), repeat=ranks)
            if sum(split) == total and not np.any(split * (row == 0))
        ]
        for total, row in zip(tokens.sum(axis=1).tolist(), replicas, strict=True)
    ]
    best = min(np.sum(choice, axis=0).max() for choice in product(*options))
    assert capacities.sum(axis=0).max() == best
    sent = matrix(dispatch_schedule(tokens, replicas, MinMax()), ranks)
    np.testing.assert_array_equal(sent.sum(axis=2), tokens)


@PROPERTY
@given(cases(most_ranks=4, most_tokens=9), st.sampled_from([1, 1 << 29, 1 << 31, (1 << 33) + 7, (1 << 45) - 1]))
def test_minmax_counts_beyond_32_bits(case, times):
    tokens, replicas = case
    tokens = tokens * times + (tokens > 2)
    capacities = minmax_capacities(tokens, replicas)
    np.testing.assert_array_equal(capacities.sum(axis=1), tokens.sum(axis=1))
    assert (capacities >= 0).all()
    assert (capacities[replicas == 0] == 0).all()
    # The tokens of some experts exceed their ranks together. The least load of the busiest rank is the largest such
    # mean.
    worst = 0
    for size in range(1, len(tokens) + 1):
        for chosen in combinations(range(len(tokens)), size):
            hosts = int((replicas[list(chosen)] > 0).any(axis=0).sum())
            demand = int(tokens[list(chosen)].sum())
            worst = max(worst, -(-demand // hosts)) if hosts else worst
    assert capacities.sum(axis=0).max() == worst


def test_invalid_tables_are_refused():
    with pytest.raises(BadInputError, match="expert 1 has 3 tokens but no replica"):
        dispatch_schedule(np.array([[1], [3]]), np.array([[1], [0]]), Interval())
    with pytest.raises(BadInputError, match=r"must be \[experts, ranks\]"):
        dispatch_schedule(np.array([[1]]), np.array([[1, 1]]), Interval())
    with pytest.raises(BadInputError, match="must be >= 0"):
        dispatch_schedule(np.array([[-1]]), np.array([[1]]), Interval())
    with pytest.raises(BadInputError, match="never falling"):
        dispatch_schedule(np.array([[1, 1]]), np.array([[1, 1]]), NodeInterval(np.array([1, 0])))
