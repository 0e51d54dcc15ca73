"""Migration: the fewest moves, even senders, workers within nodes."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_cases import PROPERTY, problems

from holdfast.planning import (
    assign_roles,
    make_plan,
    plan_migration,
    plan_transfers,
    split_over_workers,
    strategy_named,
)
from holdfast.planning.moving.migration import _kept_copies, greedy_roles
from holdfast.planning.moving.transfers import choose_senders
from holdfast.planning.plan import Plan


def moves(held, counts) -> int:
    return int(((counts > 0) & ~(held > 0)).sum())


@PROPERTY
@given(problem=problems(most_nodes=5, uneven=False), seed=st.integers(0, 99))
def test_roles_move_the_fewest_experts_possible(problem, seed):
    planned = strategy_named("mro").place(problem)
    held = np.random.default_rng(seed).integers(0, 2, planned.shape)
    migration = plan_migration(held, planned)
    best = min(moves(held, planned[:, :, list(roles)]) for roles in permutations(range(problem.nodes)))
    assert moves(held, migration.counts) == best
    assert sorted(migration.roles) == list(range(problem.nodes))


@PROPERTY
@given(problem=problems(most_nodes=6), seed=st.integers(0, 99))
def test_roles_stay_within_their_kind(problem, seed):
    planned = strategy_named("spread").place(problem)
    held = np.random.default_rng(seed).integers(0, 2, planned.shape)
    roles = assign_roles(held, planned, kinds=problem.slots)
    np.testing.assert_array_equal(problem.slots[roles], problem.slots)


def test_greedy_roles_are_a_permutation_near_the_optimum():
    rng = np.random.default_rng(5)
    held, planned = rng.integers(0, 2, (2, 1, 40, 30))
    kept = _kept_copies(held, planned)
    greedy = greedy_roles(kept)
    assert sorted(greedy) == list(range(30))
    optimal = assign_roles(held, planned)
    assert kept[np.arange(30), greedy].sum() >= 0.9 * kept[np.arange(30), optimal].sum()


def test_an_unchanged_plan_moves_nothing():
    plan = make_plan([[5, 1, 1, 1]], np.array([2] * 4), fault_threshold=2, strategy=strategy_named("mro"))
    assert isinstance(plan, Plan)
    migration = plan_migration(plan.counts, plan.counts)
    assert migration.expert_moves == 0
    assert migration.roles.tolist() == [0, 1, 2, 3]


@PROPERTY
@given(problem=problems(), seed=st.integers(0, 99))
def test_transfers_bring_exactly_the_missing_experts_from_their_hosts(problem, seed):
    wanted = strategy_named("mro").place(problem)
    held = np.random.default_rng(seed).integers(0, 2, wanted.shape)
    transfers, lost = plan_transfers(held, wanted)
    state = held > 0
    for layer, expert, source, destination in transfers.as_tuples():
        assert held[layer, expert, source] > 0
        assert not state[layer, expert, destination]
        state[layer, expert, destination] = True
    missing = {(int(layer), int(expert)) for layer, expert, _ in np.argwhere((wanted > 0) & ~state)}
    assert set(lost) == missing
    assert all(not held[layer, expert].any() for layer, expert in lost)


@PROPERTY
@given(nodes=st.integers(1, 4), transfers=st.integers(1, 6), seed=st.integers(0, 999))
def test_the_busiest_sender_sends_as_little_as_possible(nodes, transfers, seed):
    rng = np.random.default_rng(seed)
    owners = rng.random((transfers, nodes)) < rng.choice((0.2, 0.5, 0.9))
    owners[np.arange(transfers), rng.integers(0, nodes, transfers)] = True
    source = choose_senders(owners)
    assert owners[np.arange(transfers), source].all()
    choices = product(*(np.flatnonzero(mine) for mine in owners))
    best = min(np.bincount(choice).max() for choice in choices)
    assert np.bincount(source).max() == best


def test_many_transfers_are_even_over_equal_owners():
    owners = np.random.default_rng(3).random((5000, 16)) < 0.5
    owners[np.arange(5000), np.arange(5000) % 16] = True
    sent = np.bincount(choose_senders(owners), minlength=16)
    assert sent.max() - sent.min() <= 16


def test_endangered_experts_are_replaced_first():
    held = np.array([[[1, 1, 1, 0], [1, 0, 0, 0]]])
    wanted = np.array([[[1, 1, 1, 1], [1, 1, 1, 0]]])
    transfers, _ = plan_transfers(held, wanted)
    assert [row[1] for row in transfers.as_tuples()] == [1, 1, 0]


@PROPERTY
@given(problem=problems(most_nodes=4), seed=st.integers(0, 99))
def test_workers_share_their_node_evenly(problem, seed):
    counts = strategy_named("mro").place(problem)
    workers = np.random.default_rng(seed).integers(1, 5, problem.nodes)
    split = split_over_workers(counts, workers)
    node_of = np.repeat(np.arange(workers.size), workers)
    for node in range(problem.nodes):
        mine = split[:, :, node_of == node]
        np.testing.assert_array_equal(mine.sum(axis=2), counts[:, :, node])
        held = mine.sum(axis=1)
        assert (held.max(axis=1) - held.min(axis=1) <= 1).all()
        assert (mine.max(axis=2) - mine.min(axis=2) <= 1).all()


@PROPERTY
@given(problem=problems(most_nodes=3), seed=st.integers(0, 99))
def test_workers_keep_the_experts_that_they_hold(problem, seed):
    counts = strategy_named("mro").place(problem)
    workers = np.full(problem.nodes, 3)
    dealt = split_over_workers(counts, workers)
    shuffle = np.concatenate([3 * node + np.random.default_rng(seed).permutation(3) for node in range(problem.nodes)])
    held = dealt[:, :, shuffle]
    assert moves(held, split_over_workers(counts, workers, held)) == 0


def test_workers_receive_from_their_own_node_if_it_has_a_copy():
    held = np.array([[[1, 0, 1, 0]]])
    wanted = np.array([[[1, 1, 1, 1]]])
    transfers, _ = plan_transfers(held, wanted, node_of=np.array([0, 0, 1, 1]))
    assert sorted((row[2], row[3]) for row in transfers.as_tuples()) == [(0, 1), (2, 3)]


@PROPERTY
@given(problem=problems(most_nodes=5), gone=st.integers(0, 4))
def test_after_a_loss_the_plan_keeps_the_guarantee_on_the_remaining_nodes(problem, gone):
    assume(problem.nodes > gone)
    held = strategy_named("mro").place(problem)[:, :, gone:]
    assume(problem.slots[gone:].sum() >= problem.replicas.shape[1])
    plan = make_plan(
        problem.replicas, problem.slots[gone:], fault_threshold=2, strategy=strategy_named("mro"), held=held
    )
    assert isinstance(plan, Plan)
    assert plan.migration is not None
    assert ((plan.counts > 0).sum(axis=2) >= plan.fault_threshold.given).all()
    np.testing.assert_array_equal(plan.counts.sum(axis=1), np.tile(plan.slots, (len(held), 1)))
