"""Tests of workers that are slower than the others at their own work."""

from __future__ import annotations

import pytest
from machinery import Job, w

from holdfast.coordination.hang_detection.straggler_scores import WorkerTimes
from holdfast.protocol.messages.progress import Activity, OwnTimes

NODES = ("n0", "n1", "n2", "n3")


def times(node: str, seconds: float, slow: int = 0) -> OwnTimes:
    counts = {Activity.COMPUTE: slow} if slow else dict[Activity, int]()
    return OwnTimes(
        compute_s={w(node): seconds}, slow=counts, link_bytes_per_s={w(node): 1e6 / seconds} if seconds else {}
    )


def scores(stragglers: WorkerTimes) -> dict[str, float]:
    return {pace.worker: pace.score for pace in stragglers.paces(map(w, NODES))}


def test_a_worker_is_compared_with_the_median_of_the_others() -> None:
    stragglers = WorkerTimes()
    for node, seconds in zip(NODES, (0.125, 0.5, 0.25, 0.125), strict=True):
        stragglers.on_own_times(node, times(node, seconds))
    assert scores(stragglers) == {w("n1"): 4.0, w("n2"): 2.0, w("n0"): 0.5, w("n3"): 0.5}
    assert [pace.worker for pace in stragglers.paces(map(w, NODES))][:2] == [w("n1"), w("n2")]


def test_links_are_compared_by_transfer_time() -> None:
    stragglers = WorkerTimes()
    for node, seconds in zip(NODES, (0.125, 0.5, 0.25, 0.0), strict=True):
        stragglers.on_own_times(node, times(node, seconds))
    links = stragglers.links(map(w, NODES))
    assert [(link.worker, link.bytes_per_s) for link in links] == [(w("n1"), 2e6), (w("n2"), 4e6), (w("n0"), 8e6)]
    assert [link.score for link in links] == pytest.approx([0.5 / 0.1875, 0.25 / 0.3125, 0.125 / 0.375])


def test_two_workers_are_compared_with_each_other_and_one_alone_has_no_score() -> None:
    stragglers = WorkerTimes()
    stragglers.on_own_times("n0", times("n0", 1.0))
    assert scores(stragglers) == {}
    stragglers.on_own_times("n1", times("n1", 2.0))
    assert scores(stragglers) == {w("n0"): 0.5, w("n1"): 2.0}


def test_only_a_nodes_own_newest_times_count() -> None:
    stragglers = WorkerTimes()
    stragglers.on_own_times("n0", times("n1", 9.0))
    stragglers.on_own_times("n0", OwnTimes(compute_s={w("n0"): 1.0, w("n2"): 9.0}, slow={}, link_bytes_per_s={}))
    stragglers.on_own_times("n1", times("n1", 3.0))
    stragglers.on_own_times("n1", times("n1", 1.0))
    assert scores(stragglers) == {w("n0"): 1.0, w("n1"): 1.0}
    stragglers.keep_nodes(["n0"])
    assert scores(stragglers) == {}


def test_a_worker_without_compute_time_has_no_score() -> None:
    stragglers = WorkerTimes()
    for node, seconds in zip(NODES, (0.0, 1.0, 1.0, 0.0), strict=True):
        stragglers.on_own_times(node, times(node, seconds))
    assert scores(stragglers) == {w("n1"): 1.0, w("n2"): 1.0}


def test_the_coordinator_keeps_compute_times_and_sums_slow_activities() -> None:
    job = Job(nodes=4).start()
    for node in NODES:
        job.deliver_from(node, times(node, 0.5 if node == "n2" else 0.25, slow=2))
    stragglers = job.machine.context.hang_detection.stragglers
    assert scores(stragglers)[w("n2")] == 2.0
    assert stragglers.slow == {Activity.COMPUTE: 8}
