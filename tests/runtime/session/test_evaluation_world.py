"""An evaluation in a job of several processes: its sums are those of one process, whoever dies in the middle of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster

from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg

STEPS = 7
Found = dict[int, dict[str, float | None]]


def opened(path: Path, nodes: int, dies: dict[str, int], *gates: int) -> Cluster:
    return Cluster(path, nodes=nodes, options={"steps": STEPS, "float64": True, "evaluate": dies, "gates": gates})


def found_by(cluster: Cluster) -> Found:
    """Return what was found at each step, by the events; each is there once, as the step after it has it."""
    evaluated = cluster.of(ev.Evaluated)
    assert [(event.name, event.step, event.samples) for event in evaluated] == [("eval", 3, 22), ("eval", 6, 22)]
    rows = {event.step: event.metrics for event in cluster.of(ev.StepCommitted) if event.metrics}
    found = {event.step: event.metrics for event in evaluated}
    paused = {event.step for event in cluster.of(ev.StepCommitted) if event.paused_s > 0}
    assert paused == {4, 7}, "what it takes is no part of a step's work"
    told = {step + 1: {f"eval/{name}": value for name, value in metrics.items()} for step, metrics in found.items()}
    assert rows == told
    return found


def shards(cluster: Cluster) -> dict[str, list[str]]:
    """Return the shards that each node has gone through, by a number in them."""
    return {path.stem: path.read_text().split() for path in cluster.directory.glob("*.shards")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The same job with one worker and no failure."""
    with opened(tmp_path_factory.mktemp("one"), 1, {}) as cluster:
        cluster.wait_done()
        assert len(set(shards(cluster)["n1"])) == 6, "22 samples, four at a time"
        return found_by(cluster)


def test_two_deaths_in_an_evaluation_leave_its_sums_as_they_are(tmp_path: Path, undisturbed: Found) -> None:
    with opened(tmp_path, 3, {"n2": 2, "n3": 3}) as cluster:
        cluster.wait_done()
        found = found_by(cluster)
        assert cluster.exit_codes() == {"n1": 0, "n2": -9, "n3": -9}
        for step, metrics in undisturbed.items():
            assert (found[step]["x"], found[step]["noise"]) == (metrics["x"], metrics["noise"]), "in every bit"
            assert found[step] == pytest.approx(metrics, rel=1e-9)
        gone_through = shards(cluster)
        first, rest = gone_through["n1"][:-6], gone_through["n1"][-6:]
        assert len(set(rest)) == 6, "alone at the second one"
        assert len(set(first)) == len(first), "what it had done was kept"
        assert len(gone_through["n2"]) == 1


def test_who_joins_where_an_evaluation_is_due_takes_part_in_it(tmp_path: Path, undisturbed: Found) -> None:
    """It has the state by then, and computes shards before it has any micro-batch."""
    with opened(tmp_path, 2, {}, 3) as cluster:
        cluster.wait("step 2", lambda: len(cluster.of(ev.StepCommitted)) >= 2)
        joiner = cluster.add()
        cluster.wait("the joiner's group", lambda: len(cluster.told(msg.Prepared)) == 3)
        cluster.go(3)
        cluster.wait_done()
        found = found_by(cluster)
        assert found[3] == pytest.approx(undisturbed[3], rel=1e-9)
        assert {event.world_size for event in cluster.of(ev.StepCommitted) if event.step > 3} == {3}
        gone_through = shards(cluster)
        assert sorted(map(len, gone_through.values())) == [4, 4, 4], "two shards of each evaluation"
        assert len(gone_through[joiner]) == 4
