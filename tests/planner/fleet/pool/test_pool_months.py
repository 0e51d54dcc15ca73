"""Months of whole pools: invariants on every trace, the pool's machine against its policy alone, and closed forms."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import BadInputError
from holdfast.planner.fleet.pool.comparison import (
    best_waf_without_failures,
    make_node_shares,
    simulate_pool,
)
from holdfast.planner.fleet.pool.divided_shares import DividedShares
from holdfast.planner.fleet.pool.gpt_tasks import (
    MODELS,
    TABLE_3,
    estimate_steps_s,
    make_gpt_job,
    make_mixed_jobs,
    make_table_3_jobs,
)
from holdfast.planner.fleet.pool.machine_shares import MachineShares
from holdfast.planner.fleet.pool.outages import (
    DAY_S,
    TRACE_A,
    TRACE_B,
    FleetTrace,
    Outage,
    TraceDrawing,
    draw_trace,
    make_node_names,
    scale_drawing,
)
from holdfast.planner.fleet.pool.systems import (
    AGAIN_S,
    HANG_S,
    NODE_SEEN_S,
    OWN,
    RESUBMIT_S,
    SET_UP_S,
    SYSTEMS,
    find_system,
    with_efficiency,
)
from holdfast.planner.fleet.pool.tasks import FleetTask

NODES = 16
#: All systems except `sized`. It gives each job its most or nothing, and the most of these jobs is the whole pool.
ALL = [name for name in SYSTEMS if name != "sized"]
SHORT = TraceDrawing(name="short", seconds=3 * DAY_S, lost=12, faults=20, repair_s=(0.02 * DAY_S, 1.5 * DAY_S))


def linear(name: str, nodes: int, weight: float = 1.0, least: int = 1) -> FleetTask:
    """Return a job that achieves one FLOP/s on each node."""
    return FleetTask(
        name=name, step_s=tuple(8.0 / held for held in range(1, nodes + 1)), flop=8.0, weight=weight, least=least
    )


def trace_of(*outages: tuple[float, str, str], nodes: int = 4, seconds: float = 10 * DAY_S) -> FleetTrace:
    """Return a trace of outages, each as (time, node, what)."""
    made = tuple(Outage(at=at, node=node, what=what) for at, node, what in outages)  # type: ignore[arg-type]
    return FleetTrace(name="made", nodes=make_node_names(nodes), outages=made, seconds=seconds)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("drawing", [TRACE_A, TRACE_B, SHORT], ids=lambda one: one.name)
def test_no_system_achieves_more_than_without_failures(name: str, drawing: TraceDrawing) -> None:
    for seed in range(4):
        tasks, trace = make_table_3_jobs(seed % 5 + 1, NODES), draw_trace(drawing, NODES, seed)
        lived = simulate_pool(SYSTEMS[name], tasks, trace)
        assert 0 < lived.total <= best_waf_without_failures(tasks, NODES) * trace.seconds * (1 + 1e-9)


def test_without_failures_our_system_achieves_the_maximum() -> None:
    for case in TABLE_3:
        tasks, quiet = make_table_3_jobs(case, NODES), trace_of(nodes=NODES)
        most = best_waf_without_failures(tasks, NODES) * quiet.seconds
        assert simulate_pool(SYSTEMS["waf"], tasks, quiet).total == pytest.approx(most)
        assert simulate_pool(SYSTEMS["megatron"], tasks, quiet).total == pytest.approx(most)


@pytest.mark.soak
def test_our_system_is_never_worse_than_shrinking_only_the_hit_job() -> None:
    compared = 0
    for case in TABLE_3:
        tasks = make_table_3_jobs(case, NODES)
        for seed in range(24):
            trace = draw_trace((TRACE_A, TRACE_B)[seed % 2], NODES, seed)
            beside = simulate_pool(SYSTEMS["hit-only"], tasks, trace)
            if not any(beside.short_s.values()):
                compared += 1
                assert simulate_pool(SYSTEMS["waf"], tasks, trace).total >= beside.total, (case, seed)
    assert compared >= 10


def test_our_system_gives_every_job_its_least_if_possible() -> None:
    for seed in range(6):
        lived = simulate_pool(SYSTEMS["waf"], make_table_3_jobs(5, NODES), draw_trace(TRACE_A, NODES, seed))
        # A job that is hit lacks its least until the failure is detected. Then it is the first to get a node.
        assert sum(lived.short_s.values()) < 60.0


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_gives_the_same_numbers(name: str) -> None:
    tasks = make_table_3_jobs(4, NODES)
    first, second = (simulate_pool(SYSTEMS[name], tasks, draw_trace(SHORT, NODES, 7)) for _ in range(2))
    assert first == second
    assert simulate_pool(SYSTEMS[name], tasks, draw_trace(SHORT, NODES, 8)) != first


@pytest.mark.parametrize("policy", ["waf", "equal", "weighted", "priority"])
def test_dividing_by_policy_gives_the_same_owners_as_the_pools_state_machine(policy: str) -> None:
    for seed in range(15):
        nodes = (16, 12, 9)[seed % 3]
        tasks = make_table_3_jobs(seed % 5 + 1, nodes)
        trace = draw_trace((TRACE_A, TRACE_B, SHORT)[seed % 3], nodes, seed)
        machine = MachineShares(policy, tasks, trace.nodes, OWN.change_s)
        alone = DividedShares(policy, tasks, trace.nodes, OWN.change_s)
        for outage in trace.outages:
            assert [machine.owner_of(node) for node in trace.nodes] == [alone.owner_of(node) for node in trace.nodes]
            if outage.what == "back":
                assert machine.add_node(outage.node, outage.at) == alone.add_node(outage.node, outage.at)
            elif outage.what == "lost":
                assert machine.remove_node(outage.node, outage.at) == alone.remove_node(outage.node, outage.at)


@pytest.mark.soak
@given(st.integers(0, 10**6), st.integers(8, 24), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_both_ways_to_share_have_the_same_total(seed: int, nodes: int, case: int) -> None:
    tasks, trace = make_table_3_jobs(case, nodes), draw_trace(scale_drawing(SHORT, nodes), nodes, seed)
    totals = [simulate_pool(SYSTEMS["waf"], tasks, trace, machine=machine).total for machine in (True, False)]
    assert totals[0] == totals[1]


@pytest.mark.parametrize("name", ALL)
def test_a_trace_that_ends_while_a_job_is_stopped_ends_there(name: str) -> None:
    tasks, end = [linear("only", 4)], DAY_S + 1.0
    lived = simulate_pool(SYSTEMS[name], tasks, trace_of((DAY_S, "n0001", "fault"), seconds=end))
    assert lived.total == pytest.approx(4 * DAY_S)
    assert lived.stopped_s["only"] + lived.short_s["only"] == pytest.approx(1.0)
    assert all(at <= end for at, _ in lived.steps)


def test_megatrons_losses_equal_figure_2() -> None:
    tasks = [linear("only", 4)]
    again_s = RESUBMIT_S + SET_UP_S + AGAIN_S
    assert HANG_S + again_s == 68 * 60.0
    fault = simulate_pool(SYSTEMS["megatron"], tasks, trace_of((DAY_S, "n0001", "fault")))
    assert fault.total == pytest.approx(4 * (10 * DAY_S - 68 * 60.0))
    lost = trace_of((DAY_S, "n0001", "lost"), (3 * DAY_S, "n0001", "back"))
    assert simulate_pool(SYSTEMS["megatron"], tasks, lost).total == pytest.approx(4 * (8 * DAY_S - again_s))
    spare = simulate_pool(SYSTEMS["megatron-spare"], tasks, lost)
    assert spare.total == pytest.approx(4 * (10 * DAY_S - NODE_SEEN_S - again_s))


def test_only_the_hit_job_changes_and_gets_its_nodes_back() -> None:
    tasks = [linear("a", 4), linear("b", 4, weight=1.5)]
    shares = make_node_shares(SYSTEMS["bamboo"], tasks, make_node_names(4), machine=True)
    assert (shares.size_of("a"), shares.size_of("b")) == (1, 3)
    hit = next(node for node in make_node_names(4) if shares.owner_of(node) == "a")
    other = next(node for node in make_node_names(4) if shares.owner_of(node) == "b")
    assert shares.remove_node(hit, 1.0) == {"a"}
    assert shares.remove_node(other, 2.0) == {"b"}
    assert (shares.size_of("a"), shares.size_of("b")) == (0, 2)
    assert shares.add_node(other, 3.0) == {"a"}
    assert shares.owner_of(other) == "a"
    assert shares.add_node(hit, 4.0) == {"b"}


def test_a_loss_stops_a_job_from_its_detection_for_its_cost() -> None:
    tasks, system = [linear("only", 4)], with_efficiency(find_system("varuna"), 0.5)
    lost = trace_of((DAY_S, "n0002", "lost"))
    stopped_s = NODE_SEEN_S + SET_UP_S + AGAIN_S
    lived = simulate_pool(system, tasks, lost)
    assert lived.total == pytest.approx(0.5 * (4 * DAY_S + 3 * (9 * DAY_S - stopped_s)))
    assert lived.stopped_s["only"] == pytest.approx(stopped_s)
    assert lived.steps == ((0.0, 2.0), (DAY_S, 0.0), (DAY_S + stopped_s, 1.5))


def test_a_job_below_its_least_lacks_nodes() -> None:
    lived = simulate_pool(SYSTEMS["hit-only"], [linear("wide", 4, least=4)], trace_of((2 * DAY_S, "n0003", "lost")))
    assert lived.short_s["wide"] == pytest.approx(8 * DAY_S, abs=10.0)
    assert lived.total == pytest.approx(4 * 2 * DAY_S)


def test_traces_have_the_counts_of_the_paper() -> None:
    for drawing in (TRACE_A, TRACE_B):
        for seed in range(5):
            trace = draw_trace(drawing, NODES, seed)
            assert (trace.count("lost"), trace.count("fault")) == (drawing.lost, drawing.faults)
            times = [outage.at for outage in trace.outages]
            assert times == sorted(times)
            assert times[-1] <= drawing.seconds
            there = set(trace.nodes)
            for outage in trace.outages:
                assert (outage.node in there) == (outage.what != "back")
                if outage.what != "fault":
                    (there.add if outage.what == "back" else there.remove)(outage.node)


def test_repairs_are_drawn_between_their_bounds() -> None:
    found: list[float] = []
    for seed in range(40):
        lost: dict[str, float] = {}
        for outage in draw_trace(TRACE_A, NODES, seed).outages:
            if outage.what == "lost":
                lost[outage.node] = outage.at
            elif outage.what == "back":
                found.append((outage.at - lost[outage.node]) / DAY_S)
    assert min(found) >= 1.0
    assert max(found) <= 7.0
    assert abs(float(np.mean(found)) - 4.0) < 0.5


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_models_steps_follow_its_memory(name: str) -> None:
    step_s = np.array(estimate_steps_s(MODELS[name], 64))
    runs = np.isfinite(step_s)
    least = int(runs.argmax())
    assert runs[least:].all()
    task = make_gpt_job("job", MODELS[name], 1.0, 64)
    assert task.least == least + 1
    shares = np.array(task.achieves[1:]) / (np.arange(1, 65) * 8 * 312e12)
    assert 0.3 < shares[least] < shares.max() < 0.62 or shares[least] == shares.max() < 0.62


def test_bad_jobs_are_refused() -> None:
    with pytest.raises(BadInputError, match="a step has 0 FLOP"):
        FleetTask(name="a", step_s=(1.0,), flop=0.0)
    with pytest.raises(BadInputError, match="job a: 1 to 3 nodes, and its steps are known for up to 2"):
        FleetTask(name="a", step_s=(1.0, 0.6), flop=1.0, most=3)
    with pytest.raises(BadInputError, match="with 1 nodes is missing"):
        FleetTask(name="a", step_s=(0.0, 0.6), flop=1.0)
    with pytest.raises(BadInputError, match="4 nodes are too few: together the 6 jobs need at least 6"):
        simulate_pool(SYSTEMS["waf"], make_table_3_jobs(5, 4), draw_trace(SHORT, 4, 0))
    with pytest.raises(BadInputError, match="two jobs have the name 'a'"):
        simulate_pool(SYSTEMS["waf"], [linear("a", 4), linear("a", 4)], trace_of())
    with pytest.raises(BadInputError, match="--policy best: it must be one of equal"):
        find_system("best")


def test_a_thousand_nodes_are_shared_out_in_a_fraction_of_a_second() -> None:
    shares = DividedShares("waf", make_mixed_jobs(32, 1024), make_node_names(1024), OWN.change_s)
    begun = time.process_time()
    for node in make_node_names(20):
        shares.remove_node(node, 3600.0)
    # 8 weeks at trace a's rates have about 1,250 failures, for which five minutes are allowed.
    assert (time.process_time() - begun) / 20 < 0.24
