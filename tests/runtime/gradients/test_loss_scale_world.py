"""A loss scale in a job of several processes: an overflow on one rank skips the step on all ranks, despite failures."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster

from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg

STEPS = 14
#: Large enough that some steps overflow on all ranks, and later ones, when it has grown again, on one.
SCALE = 2.0**21
Story = dict[int, tuple[float, bool]]


def opened(path: Path, nodes: int, *gates: int, checkpoint_every: int = 0) -> Cluster:
    options = {"steps": STEPS, "float64": True, "scale": SCALE, "gates": gates}
    return Cluster(path, nodes=nodes, options=options, checkpoint_every=checkpoint_every)


def story(cluster: Cluster) -> Story:
    """Return loss and `skipped` of each step."""
    return {event.step: (event.loss, event.skipped) for event in cluster.of(ev.StepCommitted)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The results of the same job with one worker and no failure."""
    with opened(tmp_path_factory.mktemp("one"), 1) as cluster:
        cluster.wait_done()
        return story(cluster)


def assert_same(found: Story, expected: Story) -> None:
    assert [step for step, (_, skipped) in found.items() if skipped] == [s for s, (_, skip) in expected.items() if skip]
    losses = {step: loss for step, (loss, _) in found.items()}
    assert losses == pytest.approx({step: loss for step, (loss, _) in expected.items()}, rel=1e-9)


def test_all_workers_skip_the_same_steps_and_count_their_samples(tmp_path: Path, undisturbed: Story) -> None:
    skipped = [step for step, (_, skip) in undisturbed.items() if skip]
    assert skipped[:3] == [1, 2, 3]
    assert len(skipped) > 3, "the scale has grown back and overflowed again"
    assert len(skipped) < STEPS
    with opened(tmp_path, 3) as cluster:
        cluster.wait_done()
        cluster.assert_replicas_equal()
        assert_same(story(cluster), undisturbed)
        assert {event.samples for event in cluster.of(ev.StepCommitted)} == {24}


@pytest.mark.parametrize(("phase", "step"), [("voted", 3), ("passed", 3), ("applying", 4)])
def test_a_node_death_in_or_after_a_skipped_step_does_not_change_results(
    tmp_path: Path, undisturbed: Story, phase: str, step: int
) -> None:
    """Or right after it, when the scale has just changed."""
    with opened(tmp_path, 3, 2) as cluster:
        cluster.wait("step 1", lambda: bool(cluster.of(ev.StepCommitted)))
        if phase == "passed":  # A FORWARD must be decided, and the second node dies in it.
            cluster.fail("n1", how="hold", step=step, phase="passed")
            cluster.fail("n3", how="hold", step=step, phase="passed")
            cluster.fail("n1", step=step, phase="forward")
        cluster.fail("n2", step=step, phase=phase)
        cluster.go()
        cluster.wait_done()
        cluster.assert_replicas_equal()
        assert_same(story(cluster), undisturbed)
        assert cluster.exit_codes()["n2"] == -9


def test_a_joining_node_receives_the_loss_scale(tmp_path: Path, undisturbed: Story) -> None:
    with opened(tmp_path, 2, 6) as cluster:
        cluster.wait("step 5", lambda: len(cluster.of(ev.StepCommitted)) >= 5)
        cluster.add()
        cluster.wait("the joiner's group", lambda: len(cluster.messages_of(msg.Prepared)) == 3)
        cluster.go()
        cluster.wait_done()
        cluster.assert_replicas_equal()
        assert_same(story(cluster), undisturbed)
        assert cluster.of(ev.StepCommitted)[-1].world_size == 3


def test_a_rollback_restores_the_loss_scale(tmp_path: Path, undisturbed: Story) -> None:
    with opened(tmp_path, 2, 8, checkpoint_every=3) as cluster:
        cluster.wait("step 7", lambda: len(cluster.of(ev.StepCommitted)) >= 7)
        cluster.wait("a checkpoint", lambda: bool(cluster.of(ev.CheckpointSaved)))
        for node in ("n1", "n2"):
            cluster.kill(node)
        cluster.wait("both failures", lambda: len(cluster.of(ev.NodeLeft)) == 2)
        cluster.go()
        cluster.add()
        cluster.wait("the roll-back", lambda: bool(cluster.of(ev.RolledBack)))
        cluster.wait_done()
        assert_same(story(cluster), undisturbed)
