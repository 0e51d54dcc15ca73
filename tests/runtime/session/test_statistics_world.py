"""BatchNorm in a job of several processes, with data from streams.

Despite failures, its buffers equal those of one process in every bit, because the micro-batches and their order do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster import Cluster

from holdfast.protocol import events as ev

STEPS = 40
Statistics = dict[str, list[str]]


def opened(path: Path, nodes: int, steps: int, *gates: int) -> Cluster:
    return Cluster(path, nodes=nodes, options={"steps": steps, "batch_norm": True, "streams": True, "gates": gates})


def statistics(cluster: Cluster, node: str) -> Statistics:
    """Return a node's buffers at the end, in hexadecimal."""
    found: Any = json.loads((cluster.directory / f"{node}.statistics").read_text())
    return found


def joined(cluster: Cluster) -> str:
    """Add a node, and wait until it has joined."""
    name = cluster.add()
    cluster.wait(name, lambda: any(name in event.names for event in cluster.of(ev.NodesJoined)))
    return name


def through_faults(path: Path, steps: int) -> list[Statistics]:
    """Train in worlds of four to one and back, and return the buffers of the remaining nodes."""
    with opened(path, 4, steps, 2, 12, 24) as cluster:
        cluster.wait("step 1", lambda: bool(cluster.of(ev.StepCommitted)))
        cluster.fail("n2", step=4, phase="compute")
        cluster.fail("n1", how="hold", step=8, phase="passed")  # A FORWARD must be decided.
        cluster.fail("n3", how="hold", step=8, phase="passed")
        cluster.fail("n4", step=8, phase="passed")
        cluster.go(2)
        cluster.wait("step 11", lambda: len(cluster.of(ev.StepCommitted)) >= 11)
        fifth, sixth = joined(cluster), joined(cluster)
        cluster.fail(fifth, step=16, phase="reducing")
        cluster.fail(sixth, step=18, phase="voted")
        cluster.fail("n3", step=21, phase="ready")
        cluster.go(12)
        cluster.wait("step 23", lambda: len(cluster.of(ev.StepCommitted)) >= 23)
        seventh = joined(cluster)
        cluster.go(24)
        cluster.wait_done()
        cluster.assert_replicas_equal()
        worlds = {event.world_size for event in cluster.of(ev.StepCommitted)}
        assert worlds >= {1, 2, 3, 4}, f"worlds {worlds}"
        assert "forward" in {event.decision for event in cluster.of(ev.GenerationStarted)}
        return [statistics(cluster, node) for node in ("n1", seventh)]


def alone(path: Path, steps: int) -> Statistics:
    with opened(path, 1, steps) as cluster:
        cluster.wait_done()
        return statistics(cluster, "n1")


def test_buffers_match_a_single_process_exactly(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    expected = alone(tmp_path / "one", STEPS)
    assert int(float.fromhex(expected["0.num_batches_tracked"][0])) == STEPS * 6
    assert through_faults(tmp_path, STEPS) == [expected, expected]
