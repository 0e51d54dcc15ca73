"""A standby replaces a node, which becomes a standby; invalid moves are refused without any change."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from job_cases import FOREVER, TINY, StartJob, check_losses, goes_on, goes_on_until_interrupted, wait_until

from holdfast.cli.job.waiting import await_moved
from holdfast.errors import EXIT_BAD_INPUT, EXIT_REFUSED, EXIT_UNREACHABLE
from holdfast.protocol.events import (
    CheckpointRejected,
    CheckpointSaved,
    FailureDetected,
    GenerationStarted,
    MemorySampled,
    NodeMoved,
    NodeStayed,
    RolledBack,
    StandbyReady,
    StepCommitted,
)
from holdfast.runtime.groups.transports.gloo import LINGER_S
from tests.harness.local_job import LocalJob


def status(job: LocalJob) -> dict[str, Any]:
    return json.loads(job.call("status", "--json"))


def refused(job: LocalJob, *arguments: str) -> tuple[int, str]:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        job.call("move", *arguments)
    return failed.value.returncode, failed.value.stderr


def test_an_invalid_move_is_refused_and_changes_nothing(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.2", options=("--standbys", "1"))
    job.wait(StandbyReady)
    goes_on(job)
    for arguments, code, text in (
        (("node-9",), EXIT_UNREACHABLE, "there is no node 'node-9'"),
        (("node-1", "--to", "node-2"), EXIT_BAD_INPUT, "node node-2 is in use"),
        (("node-1", "node-1"), EXIT_BAD_INPUT, "'node-1' is named twice"),
        (("node-1", "node-2", "--to", "node-2", "--to", "node-1"), EXIT_BAD_INPUT, "node node-2 will leave"),
        (("node-1", "--to", "standby-0", "--to", "node-2"), EXIT_BAD_INPUT, "2 targets are named for node node-1"),
        (("node-1", "node-2"), EXIT_REFUSED, "there is 1 standby for 2; start one (holdfast agent --standby)"),
        (("standby-0",), EXIT_BAD_INPUT, "node standby-0 is a standby"),
        (("--compact",), EXIT_BAD_INPUT, ", and no pool: give the --address of a pool"),
    ):
        found, error = refused(job, *arguments)
        assert (found, text in error) == (code, True), (arguments, error)
    output = job.call("move", "node-1", "--dry-run")
    assert output.startswith("standby-0 takes the place of node-1 (rank ")
    assert "why: standby-0 is warm" in output
    (forecast,) = json.loads(job.call("drain", "node-1", "--dry-run", "--json"))["forecast"]
    assert (forecast["node"], forecast["to"]) == ("node-1", "standby-0")
    assert status(job)["leaving"] == []
    goes_on_until_interrupted(job)
    assert len(job.all(GenerationStarted)) == 1
    for token in ("", "of-a-job-that-is-over"):
        job.environment["HOLDFAST_TOKEN"] = token
        code, output = refused(job, "node-1")
        assert (code, "no coordinator answers" in output) == (EXIT_UNREACHABLE, True), output
    check_losses(job, script=TINY, least=4)


def test_a_move_of_the_only_node_without_a_standby_is_refused(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.1", nodes=1)
    job.wait(StepCommitted, step=2)
    code, error = refused(job, "node-0")
    assert code == EXIT_REFUSED
    assert "there is no standby; start one (holdfast agent --standby)" in error
    goes_on_until_interrupted(job)


def test_a_moved_node_becomes_a_warm_standby_and_takes_its_rank_back(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.2", options=("--standbys", "1", "--verify-state", "1"))
    job.wait(StandbyReady)
    goes_on(job)
    before, pids = job.all(GenerationStarted)[-1].members, job.pids("node-1")
    output = job.call("move", "node-1", "--to", "standby-0")
    assert "standby-0 has taken node-1's place: " in output
    after = tuple("standby-0" if name == "node-1" else name for name in before)
    assert job.all(GenerationStarted)[-1].members == after
    assert job.wait(NodeMoved, from_node="node-1", to_node="standby-0").reason == "move"
    wait_until(lambda: re.search(r"^node-1 +standby .* warm", job.call("status"), re.MULTILINE) is not None)
    assert job.pids("node-1") == pids, "the node's process was replaced"
    goes_on(job)
    assert json.loads(job.call("move", "standby-0", "--json"))["moved"][0]["to_node"] == "node-1"
    assert job.all(GenerationStarted)[-1].members == before
    goes_on_until_interrupted(job)
    worlds = [event.world_size for event in job.all(StepCommitted)]
    assert (set(worlds), worlds.count(4) <= 4) == ({3, 4}, True), (
        "the world had 4 workers for more than two steps per move"
    )
    assert not job.all(FailureDetected)
    assert not job.all(RolledBack)
    check_losses(job, script=TINY, least=9)


def test_a_move_waits_for_a_standby_to_become_warm(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.2", options=("--standbys", "1", "--verify-state", "1"))
    job.wait(StepCommitted, step=1)
    assert job.call("move", "node-2", "--no-wait").startswith("node-2 is replaced at the end of a step")
    assert job.wait(StandbyReady).seq < job.wait(NodeMoved, from_node="node-2").seq
    goes_on_until_interrupted(job)
    assert not job.all(FailureDetected)
    check_losses(job, script=TINY, least=6)


def test_a_move_not_finished_at_the_end_of_the_job_is_reported(start_job: StartJob) -> None:
    """The standby needs longer for its shadow steps than the job for its last step."""
    job = start_job("--steps", "2", "--step-seconds", "1.5", options=("--standbys", "1"))
    job.wait(StepCommitted, step=1)
    with job.client() as client:
        after = client.status()["events"]
        client.move(["node-1"])
        outcome = await_moved(client, ["node-1"], after, print_status=None)["node-1"]
    assert job.wait_exit() == 0, job.story()
    (stayed,) = job.all(NodeStayed)
    assert outcome == stayed
    assert (stayed.node, stayed.reason) == ("node-1", "job_ended")
    assert not job.all(NodeMoved)


def test_checkpoints_stay_complete_when_the_first_node_moves(start_job: StartJob, tmp_path: Path) -> None:
    saving = ("--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "1")
    job = start_job(*FOREVER, "--step-seconds", "0.2", options=("--standbys", "1", "--verify-state", "1", *saving))
    job.wait(StandbyReady)
    job.wait(CheckpointSaved)
    first = job.all(GenerationStarted)[-1].members[0]
    assert f"standby-0 has taken {first}'s place" in job.call("move", first)
    moved = job.wait(NodeMoved).seq
    wait_until(lambda: any(event.seq > moved for event in job.all(CheckpointSaved)))
    goes_on_until_interrupted(job)
    assert not job.all(FailureDetected)
    assert not job.all(CheckpointRejected)
    check_losses(job, script=TINY, least=6)


def held(job: LocalJob, nodes: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Return the number of descriptors and threads of each node's worker."""
    pids = {node: job.pids(node)[1][0] for node in nodes}
    return {
        node: (len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))) for node, pid in pids.items()
    }


def test_many_moves_leak_no_descriptors_or_threads_and_report_their_memory(start_job: StartJob) -> None:
    job = start_job(*FOREVER, "--step-seconds", "0.1", nodes=2, options=("--standbys", "1"))
    job.wait(StandbyReady)
    goes_on(job)
    nodes, place = ("node-0", "node-1", "standby-0"), 0

    def move() -> None:
        nonlocal place
        leaver, place = job.nodes()[0], len(job.events)
        with job.client() as client:
            client.move([leaver])
        job.wait(NodeMoved, from_node=leaver, since=place)
        job.wait(StandbyReady, node=leaver, since=place)

    move()
    sampled = job.wait(MemorySampled)
    assert {one.role for one in sampled.nodes} == {"leaver", "joiner", "stayer"}
    assert all(one.peak == max(sample.memory for sample in one.samples) > 1 << 20 for one in sampled.nodes)
    (joiner,) = [one for one in sampled.nodes if one.role == "joiner"]
    assert joiner.samples[-1].received > joiner.samples[0].received
    for _ in range(3):
        move()
    before = settled(job, nodes)
    for _ in range(8):
        move()
    wait_until(lambda: all(now <= then for now, then in zip(sums(held(job, nodes)), before, strict=True)))
    goes_on_until_interrupted(job)


def settled(job: LocalJob, nodes: tuple[str, ...]) -> list[int]:
    """Return the stable sums of descriptors and threads; a group is closed some time after it is left."""
    seen, since = sums(held(job, nodes)), time.monotonic()

    def stays() -> bool:
        nonlocal seen, since
        before, seen = seen, sums(held(job, nodes))
        if seen != before:
            since = time.monotonic()
        return time.monotonic() - since > 3 * LINGER_S

    wait_until(stays)
    return seen


def sums(counts: dict[str, tuple[int, int]]) -> list[int]:
    return [sum(column) for column in zip(*counts.values(), strict=True)]
