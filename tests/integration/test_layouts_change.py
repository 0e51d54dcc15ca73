"""A running job changes its layout with its number of nodes (docs/layouts.md): no step is lost or repeated."""

from __future__ import annotations

import pytest
from job_cases import FOREVER, TINY, StartJob, calm_losses, goes_on, goes_on_until_interrupted

from holdfast.observability.event_lines import read_events
from holdfast.observability.report import committed_steps
from holdfast.protocol.events import GenerationStarted, LayoutChanged, RolledBack, StepCommitted

SPREAD = TINY.with_name("tiny_spread.py")


@pytest.mark.parametrize(
    ("model", "room"),
    [
        pytest.param((), (), id="dense"),
        pytest.param(("--experts", "4"), ("--expert-slots", "3"), id="experts", marks=pytest.mark.soak),
    ],
)
def test_replicas_are_unsharded_on_three_nodes_and_sharded_on_two(
    model: tuple[str, ...], room: tuple[str, ...], start_job: StartJob
) -> None:
    """With three nodes each worker has a replica; with fewer nodes the two workers of a node share one.

    No node has all four experts, so each of two nodes needs the stashed experts of the other.
    """
    options = ("--workers-per-node", "2", *room)
    layouts = ("--shard", "2", "--shard-from", "3:1", *model)
    job = start_job(*FOREVER, "--step-seconds", "0.3", *layouts, nodes=3, options=options, script=SPREAD)
    job.wait(StepCommitted, step=4)
    first = job.nodes()[0]
    job.signal_node(first)
    job.wait(GenerationStarted, reason="failure", world_size=4)
    shrunk = job.wait(LayoutChanged)
    assert (shrunk.from_layout, shrunk.to_layout, shrunk.nodes) == ("one place", "shard 2", 2)
    assert model or shrunk.moved_bytes == 0
    goes_on(job)
    since = len(job.events)
    job.add_nodes(1)
    job.wait(GenerationStarted, reason="join", world_size=6, since=since)
    grown = job.wait(LayoutChanged, since=since)
    assert (grown.from_layout, grown.to_layout, grown.nodes) == ("shard 2", "one place", 3)
    goes_on_until_interrupted(job)
    steps = committed_steps(read_events(job.events_file))
    calm = calm_losses("--steps", "100", *model, script=SPREAD)
    assert len(steps) < 100
    assert [step.loss for step in steps] == pytest.approx([calm[step.step - 1] for step in steps], rel=1e-12)
    committed = [step.step for step in job.all(StepCommitted)]
    assert committed == list(range(1, len(committed) + 1)), job.story()
    assert not job.all(RolledBack)
