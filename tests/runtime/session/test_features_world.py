"""All features in one job of several processes, through deaths, joins and a rollback.

Without experts, the job equals a job of one process in every bit. With experts and gradients clipped by a global
norm, it equals it as closely as sums of float64 can.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from features import UPDATES, train

from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import ExpertSpec
from holdfast.protocol.messages import any_side as msg

STEPS = 16
#: The interval of the checkpoints that a job returns to.
KEPT_EVERY = 4
EXPERTS: dict[str, Any] = {"experts": 6, "max_grad_norm": 1.0}
Rows = dict[int, dict[str, float]]


def opened(
    path: Path, nodes: int, *gates: int, zygote: str = "", placing: ExpertSpec | None = None, **more: Any
) -> Cluster:
    path.mkdir(exist_ok=True)
    options = {"script": train, "steps": STEPS, "gates": gates, "loader_workers": int(bool(zygote)), **more}
    return Cluster(path, nodes=nodes, options=options, checkpoint_every=KEPT_EVERY, zygote=zygote, experts=placing)


def states(cluster: Cluster) -> dict[int, set[str]]:
    """Return all state hashes that the workers reported, by step."""
    found: dict[int, set[str]] = {}
    for applied in cluster.messages_of(msg.Applied):
        found.setdefault(applied.step, set()).add(applied.state_hash)
    return found


def rows(cluster: Cluster) -> Rows:
    """Return each step's loss, whether it was skipped, and all values logged or evaluated before it.

    For a repeated step, these are the newest values.
    """
    steps = cluster.of(ev.StepCommitted)
    return {event.step: {"loss": event.loss, "skipped": event.skipped, **event.metrics} for event in steps}


def saved(cluster: Cluster) -> list[int]:
    return [event.step for event in cluster.of(ev.CheckpointSaved)]


def alone(path: Path, **more: Any) -> tuple[dict[int, set[str]], Rows]:
    """Return states and rows of the same job with one worker and no failure."""
    with opened(path, 1, **more) as cluster:
        cluster.wait_done()
        assert sorted(rows(cluster)) == list(range(1, STEPS + 1))
        assert 2 < sum(row["skipped"] for row in rows(cluster).values()) < STEPS, "the loss scale must skip some steps"
        return states(cluster), rows(cluster)


def through_faults(cluster: Cluster) -> None:
    """Kill workers in the turn of each optimizer, force a FORWARD, let one join, then kill all to force a rollback.

    The joining worker, and one of the workers that load the checkpoint, have run shadow steps.
    """
    cluster.wait("step 1", lambda: bool(cluster.of(ev.StepCommitted)))
    cluster.fail("n1", step=4, phase="reducing")
    for survivor in ("n2", "n4"):
        cluster.fail(survivor, how="hold", step=6, phase="passed")
    cluster.fail("n3", step=6, phase="passed")
    cluster.go(2)
    cluster.wait("step 7", lambda: len(cluster.of(ev.StepCommitted)) >= 7)
    cluster.add(warm="before")
    cluster.wait("n5", lambda: any(report.worker.startswith("n5/") for report in cluster.messages_of(msg.Prepared)))
    cluster.go(8)
    # Otherwise this save might cause the next one to be left out.
    cluster.wait("the checkpoint before", lambda: 8 in saved(cluster))
    cluster.go(12)
    cluster.wait("a checkpoint", lambda: 12 in saved(cluster))
    for node in ("n2", "n4", "n5"):
        cluster.kill(node)
    cluster.wait("all deaths", lambda: len(cluster.of(ev.NodeLeft)) == 5)
    cluster.go()
    cluster.add()
    cluster.add(warm="before")
    cluster.wait_done()
    assert {"forward", "redo", "rollback"} <= {event.decision for event in cluster.of(ev.GenerationStarted)}
    assert [(event.reason, event.steps) for event in cluster.of(ev.JobFinished)] == [("stopped", STEPS)]
    assert saved(cluster)[-1] == STEPS, "a job that its script stops must be saved"
    late = [(cluster.directory / f"{node}.jsonl").read_text().splitlines() for node in ("n6", "n7")]
    trained = {tuple(json.loads(line)[:2]) for lines in late for line in lines}
    assert trained == {(step, UPDATES[(step - 1) % 3]) for step in range(13, STEPS + 1)}


def near(expected: Rows) -> Any:
    return {step: pytest.approx(row, rel=1e-9, abs=1e-12) for step, row in expected.items()}


def test_a_dense_job_with_all_features_matches_a_single_worker_exactly(tmp_path: Path, warm_torch: str) -> None:
    expected, calm = alone(tmp_path / "alone")
    with opened(tmp_path / "job", 4, 2, 8, 12, 13, zygote=warm_torch) as cluster:
        through_faults(cluster)
        assert states(cluster) == expected
        assert rows(cluster) == near(calm)
        evaluated = [event.step for event in cluster.of(ev.Evaluated)]
        assert sorted(set(evaluated)) == [5, 10, 15]
        assert {step: row["eval/loss"] for step, row in rows(cluster).items() if "eval/loss" in row} == {
            step: calm[step]["eval/loss"] for step in (6, 11, 16)
        }, "the results must be equal in every bit"


def test_a_job_with_experts_and_all_features_matches_a_single_worker(tmp_path: Path, warm_torch: str) -> None:
    """Six micro-batches on four workers: workers that only serve leave no statistics, values or positions."""
    _, calm = alone(tmp_path / "alone", **EXPERTS)
    with opened(tmp_path / "job", 4, 2, 8, 12, 13, zygote=warm_torch, **EXPERTS) as cluster:
        through_faults(cluster)
        cluster.assert_replicas_equal()
        assert rows(cluster) == near(calm)


def test_experts_are_rebalanced_with_all_features_enabled(tmp_path: Path, warm_torch: str) -> None:
    """The experts follow an uneven load, whether or not a move pays off."""
    hot = {**EXPERTS, "hot": 0.9}
    _, calm = alone(tmp_path / "alone", **hot)
    placing = ExpertSpec(slots=4, rebalance_every=4)
    with opened(tmp_path / "job", 3, zygote=warm_torch, placing=placing, **hot) as cluster:
        cluster.wait_done()
        assert any(event.adopted and event.moves for event in cluster.of(ev.RebalanceDecided))
        assert "rebalance" in {event.reason for event in cluster.of(ev.GenerationStarted)}
        cluster.assert_replicas_equal()
        assert rows(cluster) == near(calm)
