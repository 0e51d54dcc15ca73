"""`rebalance_experts`: the same arrays as EPLB, never worse than EPLB, and its additional features."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from holdfast.errors import BadInputError
from holdfast.placement import VllmPolicy, rebalance_experts, sglang_rebalance_experts
from holdfast.planning.balance.eplb import EplbShape, eplb
from holdfast.planning.survival.recovery_probability import recovery_curve
from places import RECORDED


def loads_of(layers: int, experts: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).pareto(1.2, (layers, experts)) * 1000 + 1


def busiest(slots: np.ndarray, loads: np.ndarray, gpus: int) -> np.ndarray:
    """Return the work of the busiest GPU over the mean, per layer."""
    number = np.stack([np.bincount(row, minlength=loads.shape[1]) for row in slots])
    work = np.take_along_axis(loads / number, slots, axis=1).reshape(len(slots), gpus, -1).sum(axis=2)
    return work.max(axis=1) / work.mean(axis=1)


def hosts(slots: np.ndarray, experts: int, units: int) -> np.ndarray:
    """Return which units (GPUs or nodes) hold which experts, `(L, E, units)`."""
    held = slots.reshape(len(slots), units, -1)
    return np.stack([(held == expert).any(axis=2) for expert in range(experts)], axis=1)


@pytest.mark.parametrize(("groups", "nodes", "gpus"), [(4, 2, 8), (1, 2, 8), (3, 2, 4), (12, 1, 1), (1, 1, 24)])
def test_results_have_the_shape_and_meaning_of_eplbs(groups, nodes, gpus):
    slots, lists, number = rebalance_experts(loads_of(3, 12), 24, groups, nodes, gpus)
    assert slots.shape == (3, 24)
    assert number.shape == (3, 12)
    assert lists.shape == (3, 12, number.max())
    assert slots.dtype == lists.dtype == number.dtype == np.int64
    for layer in range(3):
        for expert in range(12):
            mine = lists[layer, expert][lists[layer, expert] >= 0]
            assert mine.size == number[layer, expert] >= 1
            assert (slots[layer, mine] == expert).all()
            assert (lists[layer, expert][mine.size :] == -1).all()
    if groups % nodes == 0:
        assert hosts(slots, 12, nodes).sum(axis=2).max() == 1, "whole groups stay on one node"


@pytest.mark.parametrize("seed", range(4))
def test_never_busier_than_eplb_and_survives_no_less_if_as_busy(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        nodes, per_node, groups = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.choice([1, 2, 4]))
        gpus, experts = nodes * per_node, groups * int(rng.integers(1, 9))
        slots = -(-experts // gpus) * gpus + int(rng.integers(0, 3)) * gpus
        loads = rng.pareto(1.2, (2, experts)) * 1000 + 1
        ours = rebalance_experts(loads, slots, groups, nodes, gpus)[0]
        theirs = eplb(loads, EplbShape(replicas=slots, groups=groups, nodes=nodes, gpus=gpus))
        mine, other = (busiest(found, loads, gpus).mean() for found in (ours, theirs))
        assert mine <= other + 1e-9
        if mine >= other - 1e-9:
            survives = [
                recovery_curve(hosts(found, experts, nodes).astype(int)).probability for found in (ours, theirs)
            ]
            assert (survives[0] >= survives[1] - 1e-9).all()


@pytest.mark.parametrize(("name", "gpus"), [("lazarus_gpt_L_12L16E", 10), ("smartmoe_24L32E", 16)])
def test_on_recorded_loads_never_busier_than_eplb(name, gpus):
    path = RECORDED / "routing" / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"recorded routing is not at {path}")
    with np.load(path) as trace:
        tokens = trace["tokens"]
    for place in (0, 20, 100, 400):
        loads = tokens[place].astype(float)
        shape = EplbShape(replicas=gpus * 4, groups=1, nodes=1, gpus=gpus)
        ours = rebalance_experts(loads, gpus * 4, 1, gpus, gpus)[0]
        assert busiest(ours, loads, gpus).mean() <= busiest(eplb(loads, shape), loads, gpus).mean() + 1e-9


def test_a_threshold_spreads_every_expert_over_nodes_at_low_cost():
    loads = loads_of(4, 64)
    slots = rebalance_experts(loads, 160, 8, 4, 16, fault_threshold=2)[0]
    assert hosts(slots, 64, 4).sum(axis=2).min() >= 2
    assert busiest(slots, loads, 16).mean() < 1.1
    eplb_slots = rebalance_experts(loads, 160, 8, 4, 16)[0]
    assert hosts(eplb_slots, 64, 4).sum(axis=2).min() == 1


def test_racks_replace_nodes_as_failure_domains():
    slots = rebalance_experts(loads_of(2, 16), 48, 1, 6, 12, fault_threshold=2, racks=["a", "b", "a", "b", "c", "c"])[0]
    by_node = hosts(slots, 16, 6)
    by_rack = np.stack([by_node[:, :, nodes].any(axis=2) for nodes in ([0, 2], [1, 3], [4, 5])], axis=2)
    assert by_rack.sum(axis=2).min() >= 2


@pytest.mark.parametrize("threshold", [1, 2])
def test_a_budget_bounds_the_copies_and_buys_balance(threshold):
    loads = loads_of(3, 32)
    old = rebalance_experts(loads, 96, 1, 4, 16, fault_threshold=threshold)[0]
    drifted = loads * np.random.default_rng(1).uniform(0.4, 1.6, loads.shape)
    before, held = busiest(old, drifted, 16).mean(), hosts(old, 32, 16)
    reached = []
    for budget in (0, 10, 10_000):
        new = rebalance_experts(drifted, 96, 1, 4, 16, fault_threshold=threshold, old_indices=old, move_budget=budget)[
            0
        ]
        assert (hosts(new, 32, 16) & ~held).sum() <= budget
        assert hosts(new, 32, 4).sum(axis=2).min() >= threshold
        reached.append(busiest(new, drifted, 16).mean())
    assert reached[0] == pytest.approx(before)
    assert reached == sorted(reached, reverse=True)
    assert reached[-1] < reached[1] < before


def test_an_expert_that_stays_on_a_gpu_keeps_its_slot():
    loads = loads_of(3, 32)
    old = rebalance_experts(loads, 48, 1, 2, 8)[0]
    assert (rebalance_experts(loads, 48, 1, 2, 8, old_indices=old)[0] == old).all()
    new = rebalance_experts(loads[::-1], 48, 1, 2, 8, old_indices=old)[0].reshape(3, 8, 6)
    for gpu_old, gpu_new in zip(old.reshape(-1, 6), new.reshape(-1, 6), strict=True):
        for expert in set(gpu_old.tolist()) & set(gpu_new.tolist()):
            assert ((gpu_old == expert) & (gpu_new == expert)).any()


def test_lost_ranks_get_no_experts():
    loads = loads_of(2, 16)
    active = np.ones(8, dtype=bool)
    active[[2, 5]] = False
    slots, lists, number = sglang_rebalance_experts(loads, 32, 8, 2, 8, True, active)
    dead = np.repeat(~active, 4)
    assert (slots[:, dead] == 0).all()
    assert number.sum(axis=1).tolist() == [24, 24]
    assert not np.isin(lists[lists >= 0], np.flatnonzero(dead)).any()
    assert busiest(slots[:, ~dead], loads, 6).mean() < 1.3
    counted = sglang_rebalance_experts(np.stack([loads, loads]), 32, None, 2, 8, False)
    assert (counted[0] == rebalance_experts(loads, 32, 1, 2, 8)[0]).all()
    halves = np.full((100, 1, 2), 1000, dtype=np.float16)  # Their sum exceeds float16.
    assert sglang_rebalance_experts(halves, 2, None, 1, 2, False)[2].tolist() == [[1, 1]]
    listed = sglang_rebalance_experts([loads.tolist(), loads.tolist()], 32, None, 2, 8, False)
    assert all((mine == theirs).all() for mine, theirs in zip(listed, counted, strict=True))


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([[[1.0, 2.0], [3.0]]], "weight is not a table: its rows differ in length"),
        ([[["a", "b"]]], "weight holds <U1: give numbers"),
        (np.full((2, 1, 2), None), "weight holds object: give numbers"),
        ([[[[1.0, 2.0]]]], r"weight has shape \(1, 1, 1, 2\)"),
        (np.zeros((0, 1, 2)), r"weight has shape \(0, 1, 2\): it has no steps"),
    ],
)
def test_invalid_load_histories_of_sglang_are_refused(steps, told):
    with pytest.raises(BadInputError, match=told):
        sglang_rebalance_experts(steps, 4, None, 1, 2, False)


def test_a_lost_node_is_compensated_within_the_budget():
    loads, active = loads_of(2, 16), np.repeat([False, True, True], 2)
    old = rebalance_experts(loads, 48, 1, 3, 6, fault_threshold=2)[0]
    asked: dict[str, Any] = {"fault_threshold": 2, "active_ranks": active, "old_indices": old, "move_budget": 0}
    slots = rebalance_experts(loads, 48, 1, 3, 6, **asked)[0]
    assert hosts(slots, 16, 3)[:, :, 1:].all()
    missing = ~hosts(old, 16, 3)[:, :, 1:]
    assert (hosts(slots, 16, 6) & ~hosts(old, 16, 6))[:, :, 2:].sum() == missing.sum()


def test_empty_ranks_are_filled_regardless_of_the_budget():
    loads, nothing = loads_of(2, 16), np.full((2, 32), -1)
    filled = rebalance_experts(loads, 32, 1, 2, 8, old_indices=nothing, move_budget=0)
    assert (filled[0] == rebalance_experts(loads, 32, 1, 2, 8)[0]).all()


def test_vllm_gets_one_array_unless_it_requests_more():
    class Safe(VllmPolicy):
        fault_threshold = 2

    loads = loads_of(2, 16)
    old = VllmPolicy.rebalance_experts(loads, 32, 1, 2, 8)
    assert (VllmPolicy.rebalance_experts(loads, 32, 1, 2, 8, old) == old).all()
    assert hosts(Safe.rebalance_experts(loads, 32, 1, 2, 8, old), 16, 2).sum(axis=2).min() == 2


def test_tensors_come_back_as_tensors():
    torch = pytest.importorskip("torch")
    loads = loads_of(2, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        results = rebalance_experts(torch.tensor(loads).to(dtype), 16, 1, 2, 4)
        assert all(result.dtype == torch.int64 and result.device.type == "cpu" for result in results)
    steps = torch.tensor(np.stack([loads, loads]) % 100).to(torch.float16)
    assert all(result.dtype == torch.int64 for result in sglang_rebalance_experts(steps, 16, None, 2, 4, False))
    same = rebalance_experts(torch.tensor(loads), 16, 1, 2, 4, active_ranks=torch.ones(4, dtype=torch.bool))
    for tensor, array in zip(same, rebalance_experts(loads, 16, 1, 2, 4), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)


GOOD: dict[str, Any] = {"weight": loads_of(2, 8), "num_replicas": 16, "num_groups": 2, "num_nodes": 2, "num_gpus": 4}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"weight": np.ones(8)}, "weight has shape (8,): give one row of loads per layer"),
        ({"weight": np.ones((1, 2, 8))}, "weight has shape (1, 2, 8)"),
        ({"weight": [[1, 2], [3]]}, "its rows differ in length"),
        ({"weight": [["a", "b"]]}, "weight holds <U1: give numbers"),
        ({"weight": -np.ones((2, 8))}, "weight of layer 0, expert 0 is -1: negative"),
        ({"weight": np.full((2, 8), np.nan)}, "expert 0 is nan: not a finite number"),
        ({"num_replicas": 4}, "num_replicas gives 4 slots for 8 experts: each needs at least one"),
        ({"num_replicas": 18}, "num_replicas is 18: it must be a multiple of num_gpus, 4"),
        ({"num_gpus": 5}, "num_gpus is 5: it must be a multiple of num_nodes, 2"),
        ({"num_gpus": 0}, "num_gpus is 0: give at least 1"),
        ({"num_groups": 3}, "num_groups is 3: it must divide the 8 experts"),
        ({"num_groups": 0}, "num_groups is 0"),
        ({"fault_threshold": 0}, "fault_threshold is 0: give at least 1"),
        ({"fault_threshold": 3}, "fault_threshold is 3: 8 experts fit on 2 different nodes or racks each"),
        ({"num_replicas": 12, "fault_threshold": 2}, "fault_threshold is 2: 8 experts fit on 1 different nodes"),
        ({"racks": [1]}, "racks has shape (1,): give one rack for each of the 2 nodes"),
        ({"active_ranks": [True]}, "active_ranks has shape (1,): give one value for each of the 4 ranks"),
        ({"active_ranks": [0, 0, 0, 0]}, "active_ranks has none of the 4 ranks alive"),
        ({"active_ranks": [1, 0, 0, 0]}, "4 slots on 1 ranks that are alive for 8 experts"),
        ({"move_budget": 3}, "move_budget is 3: give old_indices, too"),
        ({"move_budget": -1, "old_indices": np.zeros((2, 16), int)}, "move_budget is -1: give at least 0"),
        ({"old_indices": np.zeros((2, 8), int)}, "old_indices has shape (2, 8): it must be (2, 16)"),
        (
            {"old_indices": np.full((2, 16), 8)},
            "old_indices names expert 8: experts are numbered from 0, and there are 8",
        ),
        ({"old_indices": np.full((2, 16), 0.5)}, "old_indices holds float64: give whole numbers"),
        ({"old_indices": np.full((2, 16), np.inf)}, "old_indices holds inf: this number is too large"),
        (
            {"old_indices": np.full((2, 16), 2**64 - 1, np.uint64)},
            "old_indices holds 18446744073709551615: this number",
        ),
        ({"weight": np.full((2, 8), 1e308)}, "weight of layer 0, expert 0 is 1e+308: more than 1e+100"),
        ({"num_replicas": 16.0}, "num_replicas is 16.0: give a whole number"),
        ({"num_groups": None}, "num_groups is None: give a whole number"),
        ({"num_nodes": 2.0}, "num_nodes is 2.0: give a whole number"),
        ({"num_gpus": "4"}, "num_gpus is '4': give a whole number"),
        ({"fault_threshold": 1.5}, "fault_threshold is 1.5: give a whole number"),
        ({"move_budget": np.nan, "old_indices": np.zeros((2, 16), int)}, "move_budget is nan: give a whole number"),
        ({"active_ranks": [0, 1, 2, 3]}, "active_ranks holds 2: give 1 for each rank that is alive, 0 for each that"),
        ({"active_ranks": [np.nan] * 4}, "active_ranks holds nan: give 1 for each rank that is alive"),
        ({"racks": ["a", None]}, "racks is ['a', None]: name all racks by numbers, or all by text"),
        ({"racks": [[1], [2, 3]]}, "racks is not a table: its rows differ in length"),
    ],
)
def test_invalid_input_is_refused_in_one_sentence(wrong, words):
    with pytest.raises(BadInputError) as error:
        rebalance_experts(**(GOOD | wrong))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_only_numpy_is_imported():
    code = (
        "import sys\n"
        "for name in ('torch', 'scipy', 'msgspec'): sys.modules[name] = None\n"
        "import numpy as np\n"
        "from holdfast.placement import rebalance_experts, repair\n"
        "loads = np.arange(1., 33.).reshape(2, 16)\n"
        "slots = rebalance_experts(loads, 48, 4, 4, 8, fault_threshold=2)[0]\n"
        "slots = rebalance_experts(loads, 48, 4, 4, 8, fault_threshold=2, old_indices=slots, move_budget=9)[0]\n"
        "repair(slots, [0], num_gpus=8, num_nodes=4, fault_threshold=2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
