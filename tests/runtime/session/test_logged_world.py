"""`step.log` in a job of several processes: one row per step, with the same values despite failures and joins."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

from holdfast.protocol import events as ev

STEPS = 8
Rows = dict[int, dict[str, float | None]]


def opened(path: Path, nodes: int, *gates: int) -> Cluster:
    return Cluster(path, nodes=nodes, options={"steps": STEPS, "float64": True, "logs": True, "gates": gates})


def rows(cluster: Cluster) -> Rows:
    """Return the logged values of each step; each step must occur once."""
    committed = cluster.of(ev.StepCommitted)
    assert [event.step for event in committed] == list(range(1, STEPS + 1))
    return {event.step: event.metrics for event in committed}


def seen_by(cluster: Cluster, node: str) -> dict[int, dict[str, float]]:
    """Return `step.metrics` of each step as seen by a node's script."""
    lines: list[Any] = [json.loads(line) for line in (cluster.directory / f"{node}.jsonl").read_text().splitlines()]
    return {number: metrics for number, _, _, _, metrics in lines}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The rows of the same job with one worker and no failure."""
    with opened(tmp_path_factory.mktemp("one"), 1) as cluster:
        cluster.wait_done()
        return rows(cluster)


def test_a_metrics_row_has_the_values_logged_by_the_script(alone: Rows) -> None:
    assert list(alone[1]) == ["largest", "rate", "workers", "wrong", "x"]
    assert alone[1]["rate"] == 1e-2
    assert {row["wrong"] for row in alone.values()} == {None}, "NaN is null in the events"
    assert {row["workers"] for row in alone.values()} == {1.0}


def test_metrics_match_a_single_worker_through_forward_redo_and_join(tmp_path: Path, alone: Rows) -> None:
    with opened(tmp_path, 3, 2, 6) as cluster:
        cluster.wait("step 1", lambda: bool(cluster.of(ev.StepCommitted)))
        cluster.fail("n1", how="hold", step=3, phase="passed")  # A FORWARD must be decided.
        cluster.fail("n3", how="hold", step=3, phase="passed")
        cluster.fail("n2", step=3, phase="passed")
        cluster.fail("n3", step=5, phase="reducing")
        cluster.go(2)
        cluster.wait("step 5", lambda: len(cluster.of(ev.StepCommitted)) >= 5)
        joiner = cluster.add()
        cluster.wait("the joiner", lambda: any(joiner in joined.names for joined in cluster.of(ev.NodesJoined)))
        cluster.go(6)
        cluster.wait_done()
        cluster.assert_replicas_equal()
        found = rows(cluster)
        assert {row["wrong"] for row in found.values()} == {None}
        inside = ("largest", "x", "rate")
        for step, row in found.items():
            near = {name: alone[step][name] for name in inside}
            assert {name: row[name] for name in inside} == pytest.approx(near, rel=1e-9), f"step {step}"
        assert {"forward", "redo"} <= {event.decision for event in cluster.of(ev.GenerationStarted)}
        worlds = {event.step: event.world_size for event in cluster.of(ev.StepCommitted)}
        worlds[3] = 3  # Three workers have computed it, and two of them apply it in the next generation.
        assert {step: row["workers"] for step, row in found.items()} == worlds
        seen = seen_by(cluster, "n1")
        assert all(math.isnan(metrics.pop("wrong")) for metrics in seen.values())
        assert seen == {
            step: {name: value for name, value in row.items() if name != "wrong"} for step, row in found.items()
        }
