"""Tests of the modelled job against hand calculations, and of the policies that survive it."""

from __future__ import annotations

import numpy as np
import pytest
from figures_6_7 import failure_window, shuffled_nodes
from figures_12_14 import idle_first
from modelled_job import CAUSES, Costs, Formation, ModelledJob, rates
from policies import Static, chunk_load, ep_size_of, padded_load, remote_share

from holdfast.planning.availability import Batch, NodeEvent, Window

COSTS = Costs(reconfigure_s=5.0, rebalance_s=0.0, restart_s=7.0, save_s=2.0, checkpoint_every=10, gather_s=3.0)
NODES = ("a", "b", "c", "d")


class Second:
    """A model in which a step takes a second and has one sample per node."""

    samples = 1

    def step_s(self, step: int) -> float:
        return 1.0

    def steps_at_same_pace(self, step: int) -> int:
        return 1000


def window(seconds: float, *events: tuple[float, str]) -> Window:
    """Return a window of events: `+a` means that node a joins, `-a` that it leaves."""
    batches = tuple(
        Batch(seconds=at, events=(NodeEvent(seconds=at, add=what[0] == "+", node=what[1:], line=0),))
        for at, what in events
    )
    return Window(start_nodes=NODES, batches=batches, seconds=seconds)


def static(*, live: bool, ep_size: int = 2) -> Static:
    return Static(name="static", pace=Second(), ep_size=ep_size, live=live)


def test_an_undisturbed_job_spends_its_time_on_steps_and_checkpoints() -> None:
    lived = ModelledJob(static(live=True), COSTS, window(24.0)).run()
    assert (lived.steps, lived.samples) == (20, 80)
    assert lived.seconds == pytest.approx({"effective": 20.0, "checkpoint": 4.0})


def test_a_live_recovery_costs_its_duration_and_the_interrupted_step() -> None:
    lived = ModelledJob(static(live=True), COSTS, window(20.0, (4.5, "-a"))).run()
    # 4 steps, half a step lost, then 5 s. On two nodes: 6 steps, 2 s of saving, 2.5 steps.
    assert (lived.steps, lived.samples) == (12, 4 * 4 + 8 * 2)
    expected = {"effective": 12.5, "lost": 0.5, "reconfigure": 5.0, "checkpoint": 2.0}
    assert lived.seconds == pytest.approx(expected)
    assert (lived.reconfigurations, lived.restarts) == (1, 0)


def test_a_restart_loses_the_steps_after_the_checkpoint() -> None:
    lived = ModelledJob(static(live=False), COSTS, window(30.0, (15.5, "-a"))).run()
    # 10 steps, saved until 12. 3.5 steps lost, then 7 s. On two nodes: 7.5 steps.
    assert (lived.steps, lived.samples) == (17, 40 + 14)
    assert lived.seconds == pytest.approx({"effective": 17.5, "checkpoint": 2.0, "lost": 3.5, "restart": 7.0})
    assert sum(lived.seconds.values()) == pytest.approx(30.0)


def test_a_failure_during_a_recovery_restarts_the_recovery() -> None:
    lived = ModelledJob(static(live=True, ep_size=1), COSTS, window(20.0, (4.0, "-a"), (6.0, "-b"))).run()
    assert lived.seconds["reconfigure"] == pytest.approx(7.0)
    assert lived.samples == 4 * 4 + 2 * 7
    assert lived.seconds["checkpoint"] == pytest.approx(2.0)


def test_nodes_that_arrive_close_together_join_in_one_reconfiguration() -> None:
    trace = window(40.0, (1.0, "-a"), (2.0, "-d"), (20.0, "+e"), (22.0, "+f"))
    lived = ModelledJob(static(live=True), COSTS, trace).run()
    # d was idle. The others join 3 s after the last arrival, which costs a reconfiguration, as the loss of a did.
    assert lived.seconds["reconfigure"] == pytest.approx(5.0 + 5.0)
    assert lived.samples > 2 * lived.steps
    restarted = ModelledJob(static(live=False), COSTS, trace).run()
    assert restarted.restarts == 2
    assert restarted.samples < lived.samples


def test_a_step_continues_when_a_node_arrives_or_an_idle_node_leaves() -> None:
    trace = window(9.0, (2.5, "-d"), (3.5, "+e"))
    lived = ModelledJob(static(live=True, ep_size=3), COSTS, trace).run()
    assert (lived.steps, lived.samples) == (9, 27)
    assert lived.seconds == pytest.approx({"effective": 9.0})


def test_a_job_without_enough_nodes_waits() -> None:
    lived = ModelledJob(static(live=True, ep_size=4), COSTS, window(30.0, (2.0, "-a"), (12.0, "+a"))).run()
    assert lived.seconds["wait"] == pytest.approx(10.0 - 7.0 + 7.0)
    assert lived.restarts == 2
    assert set(lived.seconds) <= set(CAUSES)


def test_a_job_ends_after_its_number_of_samples() -> None:
    lived = ModelledJob(static(live=True), COSTS, window(1e6), enough=50).run()
    assert (lived.samples, lived.course[-1][0]) == (52, 15.0)


def test_rates_are_means_and_never_negative() -> None:
    lived = ModelledJob(static(live=False), COSTS, window(30.0, (15.5, "-a"))).run()
    times, found = rates(lived, every=5.0)
    assert times == [2.5, 7.5, 12.5, 17.5, 22.5, 27.5]
    assert found[:2] == [4.0, 4.0]
    assert min(found) == 0.0


def test_a_static_policy_keeps_every_chunk_covered() -> None:
    policy = static(live=True)
    before = policy.form(NODES, 0)
    assert before is not None
    after = policy.shrink(before, ("b", "c", "d"), 0)
    assert after is not None
    assert len(after.nodes) == 2
    assert set(after.chunks.values()) == {0, 1}
    grown = policy.grow(after, ("b", "c", "d", "e"), 0)
    assert len(grown.nodes) == 4
    assert sorted(grown.chunks.values()) == [0, 0, 1, 1]
    assert policy.grow(grown, ("b", "c", "d", "e"), 0) is grown
    last = Formation(nodes=("a", "b"), samples=2, step_s=Second().step_s, chunks={"a": 0, "b": 1})
    assert policy.shrink(last, ("b", "c", "d"), 0) is None
    assert static(live=False).shrink(before, ("b", "c", "d"), 0) is None


def test_expert_parallel_sizes_match_the_paper() -> None:
    assert [ep_size_of(experts) for experts in (8, 12, 16)] == [2, 2, 4]


def test_chunk_loads_with_and_without_padding() -> None:
    shares = np.array([[0.4, 0.2, 0.2, 0.2], [0.25] * 4])
    assert chunk_load(shares, 2) == pytest.approx([1.2, 1.0])
    assert padded_load(shares, 2) == pytest.approx([1.6, 1.0])


def test_tokens_stay_on_nodes_that_host_their_expert() -> None:
    everywhere = np.ones((1, 2, 2), dtype=np.int64)
    assert remote_share(everywhere, np.array([[0.5, 0.5]])) == pytest.approx([0.0])
    apart = np.array([[[1, 0], [0, 1]]])
    assert remote_share(apart, np.array([[0.5, 0.5]])) == pytest.approx([0.5])


def test_half_of_the_nodes_fail_and_idle_nodes_first_if_requested() -> None:
    order = shuffled_nodes(16, 3)
    trace = failure_window(order, 300.0, 2700.0)
    assert [event.node for batch in trace.batches for event in batch.events] == order[:8]
    policy = Static(name="t", pace=Second(), ep_size=4, live=True)
    gone = failure_window(idle_first(policy, order), 300.0, 2700.0)
    lived = ModelledJob(policy, COSTS, gone).run()
    assert lived.reconfigurations == 2
    assert lived.restarts == 0
