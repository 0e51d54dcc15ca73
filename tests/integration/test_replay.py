"""Jobs that replay an availability trace with real processes and kills."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import job_cases
import pytest
from job_cases import TINY, TINY_MOE, check_journal, check_losses

from holdfast.protocol.events import JobFailed, JobWaiting, NodeLeft, NodesJoined, Recovered, RolledBack, StepCommitted
from tests.harness.local_job import LocalJob


def replayed(tmp_path: Path, trace: Iterable[str], *args: str, options: tuple[str, ...], script: Path) -> LocalJob:
    """Replay a trace with rows `seconds,event,node` to its end."""
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(("seconds,event,node", *trace, "")))
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    folder = tmp_path / "job"
    folder.mkdir()
    options = ("--availability", str(file), *options, "--zygote", job_cases.zygote)
    with LocalJob(script, args, options=options, folder=folder, environment=environment) as job:
        job.wait_exit(180)
    check_journal(job)
    return job


@pytest.mark.soak
def test_a_replay_in_which_all_nodes_leave_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    """One node is lost; then one is left with four slots for six experts; then none; then one returns, then two."""
    trace = ("0,add,a", "0,add,b", "0,add,c", "0,add,d", "40,remove,c", "160,remove,a", "160,remove,d", "180,remove,b")
    trace += ("200,add,a", "220,add,e")
    experts = ("--experts", "6")
    options = ("--speed", "20", "--until", "6000", "--join-window", "0", "--expert-slots", "4", "--verify-state", "1")
    options += ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "2")
    job = replayed(tmp_path, trace, "--steps", "30", *experts, "--step-seconds", "2", options=options, script=TINY_MOE)
    assert job.process is not None
    assert job.process.returncode == 0, job.story()
    begin = job.all(StepCommitted)[0].time
    lost = {event.node: event.time - begin for event in job.all(NodeLeft) if event.reason == "failed"}
    assert list(lost) in (["c", "a", "d", "b"], ["c", "d", "a", "b"])
    for node, second in (("c", 2), ("a", 8), ("d", 8), ("b", 9)):
        assert second - 0.1 < lost[node], job.story()  # A loss is never early, but may be late on a busy machine.
    joined = [node for event in job.all(NodesJoined) for node in event.names]
    assert sorted(joined[:4]) == ["a", "b", "c", "d"]
    assert joined[4:] == ["a", "e"]
    assert job.all(RolledBack)
    waits = [(event.nodes, event.expert_slots) for event in job.all(JobWaiting)]
    # Several losses may be handled together, and so may both returns.
    assert waits in ([(1, 2), (2, 6), (1, 2)], [(1, 2), (2, 6)], [(2, 6), (1, 2)], [(2, 6)]), job.story()
    assert "waiting for 2 nodes with 6 more expert slots: no node is left" in job.output()
    assert {event.state_source for event in job.all(Recovered)} >= {"checkpoint"}
    check_losses(job, *experts, script=TINY_MOE, least=30)
    assert "job done" in job.output()


def test_a_replay_ends_with_its_trace_and_prints_a_summary(tmp_path: Path) -> None:
    trace = ("0,add,east", "0,add,west", "20,remove,east")
    # On a busy machine the recovery is slow.
    options = ("--speed", "50", "--until", "500", "--json")
    job = replayed(tmp_path, trace, "--steps", "1000000", "--step-seconds", "0.4", options=options, script=TINY)
    assert job.process is not None
    assert job.process.returncode == 0, job.story()
    output = job.output()
    summary = next(line for line in map(json.loads, re.findall(r"^{.*}$", output, re.MULTILINE)) if "summary" in line)
    summary = summary["summary"]
    assert summary["outcome"] == "trace over"
    assert summary["elapsed_s"] == pytest.approx(10.0)
    assert summary["nodes_lost"] == 1
    assert summary["recoveries"] == {"shrink": 1}
    assert summary["samples"] == 24 * summary["steps"] > 0
    assert not job.all(JobFailed)


def test_a_replay_that_loses_all_copies_without_a_checkpoint_fails(tmp_path: Path) -> None:
    trace = ("0,add,east", "100,remove,east", "100000,add,west")
    job = replayed(tmp_path, trace, "--steps", "1000000", "--step-seconds", "0.1", options=(), script=TINY)
    assert job.process is not None
    assert job.process.returncode == 1, job.story()
    assert "no live copy" in job.output()
