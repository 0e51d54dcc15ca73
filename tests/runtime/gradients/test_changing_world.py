"""A script's changes at a step happen on all workers or on none: losses and weights equal those of a plain loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from changing import train, train_plainly
from cluster import Cluster

from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import ExpertSpec
from holdfast.protocol.messages import any_side as msg

STEPS = 10


def losses(cluster: Cluster) -> dict[int, float]:
    """Return the losses; for a repeated step, the newest."""
    return {event.step: event.loss for event in cluster.of(ev.StepCommitted)}


def near(values: Any) -> Any:
    return pytest.approx(values, rel=1e-12, abs=1e-15)


def check(cluster: Cluster, nodes: tuple[str, ...], *, experts: int = 0, first: int = 1) -> None:
    """Check that the workers of these nodes ended with the results of a plain loop."""
    calm, numbers = train_plainly(STEPS, experts=experts, first=first)
    assert losses(cluster) == near(calm)
    for node in nodes:
        assert cluster.exit_codes()[node] == 0
        assert json.loads((cluster.directory / f"{node}.json").read_text())["numbers"] == near(numbers)


@pytest.mark.parametrize(("joins", "in_loop"), [(False, False), (True, False), (True, True)])
def test_a_rollback_removes_a_parameter_group_added_later(tmp_path: Path, joins: bool, in_loop: bool) -> None:
    """The survivors had a parameter group with state and options that the checkpoint lacks."""
    options = {"script": train, "steps": STEPS, "experts": 6, "in_loop": in_loop, "gates": (9,)}
    placing = ExpertSpec(slots=2 if joins else 3)
    with Cluster(tmp_path, nodes=3 if joins else 4, options=options, checkpoint_every=5, experts=placing) as cluster:
        cluster.wait("step 8", lambda: 8 in losses(cluster))
        cluster.wait("a checkpoint", lambda: bool(cluster.of(ev.CheckpointSaved)))
        for node in ("n1",) if joins else ("n1", "n2", "n3"):
            cluster.kill(node)
        cluster.wait("the deaths", lambda: len(cluster.of(ev.NodeLeft)) == (1 if joins else 3))
        cluster.go()
        cluster.add()
        cluster.wait_done()
        assert cluster.of(ev.RolledBack)[0].to_step == 5
        first = 1 if in_loop else 2  # The first call of after_apply follows step 1.
        check(cluster, ("n2", "n3", "n4") if joins else ("n4", "n5"), experts=6, first=first)


def test_changes_before_a_repeated_step_are_made_once(tmp_path: Path) -> None:
    """Workers die in each step that the script changes something before, and a warm standby joins after that."""
    options = {"script": train, "steps": STEPS, "in_loop": True, "gates": (2, 6)}
    with Cluster(tmp_path, nodes=3, options=options) as cluster:
        cluster.wait("step 1", lambda: 1 in losses(cluster))
        cluster.fail("n1", step=4, phase="reducing")
        cluster.go(2)
        cluster.wait("step 5", lambda: 5 in losses(cluster))
        name = cluster.add(warm="before")
        cluster.wait(
            "the joiner", lambda: any(report.worker.startswith(name) for report in cluster.messages_of(msg.Prepared))
        )
        assert not cluster.messages_of(msg.Warmed)[0].error
        cluster.fail("n2", step=7, phase="compute")
        cluster.go()
        cluster.wait_done()
        assert [event.decision for event in cluster.of(ev.GenerationStarted)].count("redo") == 2
        cluster.assert_replicas_equal()
        check(cluster, ("n3", name))


def test_a_forwarded_step_keeps_the_changes_made_before_it(tmp_path: Path) -> None:
    """The attempt is not repeated: the reduced gradients are applied with the options that they were made for."""
    options = {"script": train, "steps": STEPS, "in_loop": True, "gates": (2,)}
    with Cluster(tmp_path, nodes=4, options=options) as cluster:
        cluster.wait("step 1", lambda: 1 in losses(cluster))
        for step, dying, held in ((4, "n1", ("n2", "n3", "n4")), (7, "n2", ("n3", "n4"))):
            for node in held:
                cluster.fail(node, how="hold", step=step, phase="passed")
            cluster.fail(dying, step=step, phase="passed")
        cluster.go()
        cluster.wait_done()
        assert [event.decision for event in cluster.of(ev.GenerationStarted)].count("forward") == 2
        cluster.assert_replicas_equal()
        check(cluster, ("n3", "n4"))
