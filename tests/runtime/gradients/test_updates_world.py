"""A GAN in a job of several processes is bit-identical to one process, despite failures.

So is the state that follows its steps: averaged weights, a target network, and a learning rate that follows the loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from gan import UPDATES, train

from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg

STEPS = 12
Hashes = dict[int, set[str]]


def opened(path: Path, nodes: int, *gates: int, **more: Any) -> Cluster:
    return Cluster(path, nodes=nodes, options={"script": train, "steps": STEPS, "gates": gates}, **more)


def hashes(cluster: Cluster) -> Hashes:
    """Return all state hashes that the workers reported, by step."""
    found: Hashes = {}
    for applied in cluster.messages_of(msg.Applied):
        found.setdefault(applied.step, set()).add(applied.state_hash)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Hashes:
    """The hashes of the same job with one worker and no failure."""
    with opened(tmp_path_factory.mktemp("one"), 1) as cluster:
        cluster.wait_done()
        found = hashes(cluster)
        assert sorted(found) == list(range(1, STEPS + 1))
        assert all(len(each) == 1 and "" not in each for each in found.values())
        return found


def test_worker_deaths_and_a_join_do_not_change_alternating_updates(tmp_path: Path, undisturbed: Hashes) -> None:
    with opened(tmp_path, 3, 2, 9) as cluster:
        cluster.wait("step 1", lambda: bool(cluster.of(ev.StepCommitted)))
        cluster.fail("n1", step=5, phase="reducing")  # the critic's second update
        cluster.fail("n3", how="hold", step=6, phase="passed")  # the generator's update, which must go forward
        cluster.fail("n2", step=6, phase="passed")
        cluster.go(2)
        cluster.wait("step 8", lambda: len(cluster.of(ev.StepCommitted)) >= 8)
        cluster.add()
        cluster.wait(
            "the joiner's group",
            lambda: any(report.worker.startswith("n4") for report in cluster.messages_of(msg.Prepared)),
        )
        cluster.go(9)
        cluster.wait_done()
        assert cluster.exit_codes() == {"n1": -9, "n2": -9, "n3": 0, "n4": 0}
        assert hashes(cluster) == undisturbed
        assert {event.step: event.world_size for event in cluster.of(ev.StepCommitted)}[STEPS] == 2


def test_a_rollback_resumes_with_the_optimizer_of_its_step(tmp_path: Path, undisturbed: Hashes) -> None:
    with opened(tmp_path, 2, 8, checkpoint_every=5) as cluster:
        cluster.wait("step 7", lambda: len(cluster.of(ev.StepCommitted)) >= 7)
        cluster.wait("a checkpoint", lambda: bool(cluster.of(ev.CheckpointSaved)))
        for node in ("n1", "n2"):
            cluster.kill(node)
        cluster.wait("both failures", lambda: len(cluster.of(ev.NodeLeft)) == 2)
        cluster.go()
        cluster.add()
        cluster.wait_done()
        assert cluster.of(ev.RolledBack)[0].to_step == 5
        assert hashes(cluster) == undisturbed
        lines = [json.loads(line) for line in (tmp_path / "n3.jsonl").read_text().splitlines()]
        assert lines == [[step, UPDATES[(step - 1) % 3]] for step in range(6, STEPS + 1)]
