"""`repair` is deterministic and moves few experts, for any lost ranks."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from holdfast.errors import BadInputError
from holdfast.placement import rebalance_experts, repair

PROPERTY = settings(derandomize=True, deadline=None, max_examples=25)


@cache
def placed(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    loads = np.random.default_rng(seed).pareto(1.2, (3, 16)) * 1000 + 1
    return loads, rebalance_experts(loads, 48, 1, 4, 8, fault_threshold=2)[0]


def nodes_of(slots: np.ndarray, expert: int, layer: int) -> set[int]:
    return set((np.flatnonzero(slots[layer] == expert) // 12).tolist())


@PROPERTY
@given(dead=st.sets(st.integers(0, 7), max_size=4), threshold=st.integers(1, 2), seed=st.integers(0, 5))
def test_a_repair_copies_only_the_missing_experts(dead, threshold, seed):
    loads, before = placed(seed=seed)
    found = repair(before, sorted(dead), num_gpus=8, num_nodes=4, weight=loads, fault_threshold=threshold)
    after, gone = found.physical_to_logical_map, np.isin(np.arange(48) // 6, sorted(dead))
    assert (after[:, gone] == -1).all()
    live = np.where(gone, -1, before)
    missing = 0
    for layer in range(3):
        for expert in range(16):
            assert len(nodes_of(after, expert, layer)) >= found.fault_threshold
            missing += max(found.fault_threshold - len(nodes_of(live, expert, layer)), 0)
    assert len(found.moves) <= missing + 3, "now and then one has to make room for another"
    assert (after != live).sum() == len(found.moves) or len(found.moves) < (after != live).sum()
    for layer, expert, source, target in found.moves.tolist():
        assert after[layer, target] == expert
        assert not (live[layer] == expert)[target // 6 * 6 : target // 6 * 6 + 6].any()
        assert source == -1 or live[layer, source] == expert == after[layer, source]
    lost = {(layer, expert) for layer in range(3) for expert in range(16) if not (live[layer] == expert).any()}
    assert (
        set(found.lost) == lost == {(layer, expert) for layer, expert, source, _ in found.moves.tolist() if source < 0}
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_placement_needs_fewer_copies(seed):
    # Choose pairs of expert and node: f for each expert, at most the slots of each node, and as few new ones as
    # possible.
    rng = np.random.default_rng(seed)
    nodes, slots, threshold = int(rng.integers(2, 6)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    experts = max(nodes * slots // threshold - int(rng.integers(0, 2)), 1)
    given = rng.integers(0, experts, (1, nodes * slots))
    found = repair(given, [], num_gpus=nodes, weight=np.ones((1, experts)), fault_threshold=threshold)
    new = np.ones((experts, nodes))
    new[given[0], np.arange(nodes * slots) // slots] = 0
    fewest = linprog(
        new.ravel(),
        A_ub=np.kron(np.ones(experts), np.eye(nodes)),
        b_ub=np.full(nodes, slots),
        A_eq=np.kron(np.eye(experts), np.ones(nodes)),
        b_eq=np.full(experts, found.fault_threshold),
        bounds=(0, 1),
    )
    assert len(found.moves) == round(fewest.fun)


def test_a_copy_comes_from_a_slot_that_stays():
    found = repair([[0, -1, 0, -1, 0, 2, 2, 2, -1]], [], num_gpus=3, fault_threshold=3)
    assert found.physical_to_logical_map[0, 0] != 0
    assert [move for move in found.moves.tolist() if move[1] == 0] == [[0, 0, 2, 6]]


def test_all_survivors_compute_the_same_repair_from_any_form():
    torch = pytest.importorskip("torch")
    loads, before = placed()
    array = repair(before, [1, 6], num_gpus=8, num_nodes=4, weight=loads, fault_threshold=2)
    tensor = repair(
        torch.tensor(before),
        torch.tensor([6, 1]),
        num_gpus=8,
        num_nodes=4,
        weight=torch.tensor(loads),
        fault_threshold=2,
    )
    np.testing.assert_array_equal(tensor.physical_to_logical_map.numpy(), array.physical_to_logical_map)
    np.testing.assert_array_equal(tensor.moves.numpy(), array.moves)
    assert tensor.lost == array.lost


def test_no_loss_changes_nothing_and_a_second_loss_continues_from_the_first():
    _, before = placed()
    same = repair(before, [], num_gpus=8, num_nodes=4, fault_threshold=2)
    np.testing.assert_array_equal(same.physical_to_logical_map, before)
    assert not len(same.moves)
    first = repair(before, [0], num_gpus=8, num_nodes=4, fault_threshold=2)
    second = repair(first.physical_to_logical_map, [0, 1], num_gpus=8, num_nodes=4, fault_threshold=2)
    assert (second.physical_to_logical_map[:, :12] == -1).all()
    assert second.fault_threshold == 2
    assert second.lost == ()


def test_a_repair_spreads_copies_over_racks():
    loads = np.random.default_rng(0).pareto(1.2, (2, 8)) + 1
    before = rebalance_experts(loads, 32, 1, 4, 4, fault_threshold=2, racks=[0, 0, 1, 1])[0]
    found = repair(before, [3], num_gpus=4, racks=[0, 0, 1, 1], fault_threshold=2)
    held = found.physical_to_logical_map.reshape(2, 4, 8)
    for rack in (held[:, :2], held[:, 2:]):
        assert all(set(range(8)) <= set(layer.ravel().tolist()) for layer in rack)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dead": [0, 1, 2, 3, 4]}, "dead has 5 of 8 ranks: with more dead than alive, plan again"),
        ({"dead": [8]}, "dead names rank 8: there are 8, numbered from 0"),
        ({"dead": [0.5]}, "dead holds float64: give whole numbers"),
        ({"dead": [np.inf]}, "dead holds inf: this number is too large"),
        ({"dead": [True] + [False] * 7}, "dead holds flags: give the numbers of the ranks"),
        ({"num_gpus": -4}, "num_gpus is -4: give at least 1"),
        ({"num_gpus": None}, "num_gpus is None: give a whole number"),
        ({"num_nodes": 4.0}, "num_nodes is 4.0: give a whole number"),
        ({"fault_threshold": 1.5}, "fault_threshold is 1.5: give a whole number"),
        (
            {"physical_to_logical_map": np.full((1, 8), 10**12)},
            "physical_to_logical_map names expert 1000000000000: 8 slots have no room",
        ),
        ({"num_gpus": 7, "num_nodes": 7}, "num_replicas is 48: it must be a multiple of num_gpus, 7"),
        ({"physical_to_logical_map": np.zeros(4, int)}, "physical_to_logical_map has shape (4,)"),
        ({"physical_to_logical_map": np.full((1, 8), -2)}, "physical_to_logical_map names expert -2"),
        ({"physical_to_logical_map": np.full((1, 8), -1)}, "holds no expert at all"),
        ({"weight": np.ones((2, 16))}, "weight has shape (2, 16): the placement has 3 layers and expert 15"),
        ({"fault_threshold": 0}, "fault threshold is 0"),
        ({"physical_to_logical_map": [list(range(8))], "dead": [0]}, "7 slots on 7 live ranks are left for 8 experts"),
    ],
)
def test_an_invalid_repair_request_is_refused_in_one_sentence(change, words):
    given = {"physical_to_logical_map": placed()[1], "dead": [0], "num_gpus": 8, "num_nodes": 4} | change
    if len(np.shape(given["physical_to_logical_map"])) == 2 and np.shape(given["physical_to_logical_map"])[1] == 8:
        given["num_nodes"] = 8
    with pytest.raises(BadInputError) as error:
        repair(**given)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
