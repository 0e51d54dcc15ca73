"""Tests of `holdfast explain` on an event file."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.cli.following.progress import describe
from holdfast.cli.history.explain import condition_lines, explanation_lines
from holdfast.errors import BadInputError
from holdfast.observability.history.explanation import Explanation
from holdfast.observability.history.job_condition import JobCondition
from holdfast.protocol.events import AnyEvent, StacksTaken
from holdfast.protocol.failures import SeenWait, SeenWorker, SharedStack
from holdfast.protocol.position import Awaited
from made_events import made

#: events that lead to a request (holdfast.coordination.operator_alerts)
ABOUT = (
    *("job_waiting", "node_left", "node_stayed", "rolled_back", "checkpoint_failed", "checkpoint_delayed"),
    *("checkpoint_rejected", "snapshot_failed", "corruption_found", "step_skipped", "job_failed"),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    events: list[AnyEvent] = [
        made("job_started", seq=1, job="j"),
        made("generation_started", 1.0, seq=2, members=("a", "b"), world_size=2, reason="start", generation=1),
        *(made("step_committed", 1.0 + k, seq=2 + k, step=k, samples=8, world_size=2, step_s=1.0) for k in range(1, 7)),
        made(
            *("failure_detected", 7.5),
            seq=9,
            node="b",
            kind="process_exit",
            detector="process",
            severity=2,
            after_s=0.125,
            category="exited abnormally",
            step=7,
            phase="compute",
            micro_batch=3,
            detail="status 9",
        ),
        made("job_waiting", 8.0, seq=10, job="j", nodes=1, why="too few"),
    ]
    path = tmp_path_factory.mktemp("explain") / "e.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    return path


def test_an_event_is_explained_as_text(file: Path) -> None:
    said = CliRunner().invoke(app, ["explain", "9", str(file)]).stdout
    for words in (
        "failed: b: exited abnormally (process_exit), event 9",
        "seen after 0.125 s by process (an agent: its workers' processes)",
        "severity 2: a process of the node ends, and is started again there",
        "it stood at step 7, phase compute, micro-batch 3",
        "status 9",
    ):
        assert words in said


def test_an_event_is_explained_as_json(file: Path) -> None:
    found = json.loads(CliRunner().invoke(app, ["explain", "9", str(file), "--json"]).stdout)
    assert found["event"]["event"] == found["failures"][0]["event"] == "failure_detected"
    assert (found["over"], found["rungs"], found["action"]) == (False, [], "")


def test_the_reason_why_a_job_waits_is_shown(file: Path) -> None:
    said = CliRunner().invoke(app, ["explain", str(file)]).stdout
    assert "j is waiting since" in said
    assert "why: too few: it waits for 1 node" in said
    assert "more: holdfast explain 10" in said
    found = json.loads(CliRunner().invoke(app, ["explain", str(file), "--json"]).stdout)
    assert (found["state"], found["seq"], found["awaited"]) == ("waiting", 10, [])


def test_an_awaited_worker_is_shown_with_its_position_and_stack() -> None:
    awaited = Awaited(
        who="rank 1 on b",
        what="its report",
        since_s=2.5,
        at="compute of step 7, micro-batch 3",
        for_whom=("rank 0 on a",),
        stack=("train.py:40 forward",),
    )
    standing = JobCondition(
        job="j", state="recovering", step=6, since=1e300, stands_s=3.0, usual_step_s=1.0, why="", awaited=(awaited,)
    )
    assert list(condition_lines(standing))[-2:] == [
        (
            "awaited: rank 1 on b: its report, for 2.5 s; it is at compute of step 7, micro-batch 3; "
            "rank 0 on a wait for it"
        ),
        "  train.py:40 forward",
    ]


def test_a_job_without_steps_shows_no_time_of_the_newest_step() -> None:
    standing = JobCondition(job="j", state="waiting", step=0, since=0.0, stands_s=3.0, usual_step_s=None, why="few")
    assert [line for line in condition_lines(standing) if "newest" in line] == []


def test_hanging_and_waiting_workers_are_shown_with_their_stacks() -> None:
    wait = SeenWait(what="all_to_all", size=3, bytes=64, began_s=0.5, took_s=None)
    hangs = SeenWorker(
        worker="rank 1 on b", step=7, phase="compute", for_s=0.75, waits=False, micro_batch=3, collectives=(wait,)
    )
    waits = SeenWorker(
        worker="rank 0 on a",
        step=7,
        phase="reducing",
        for_s=0.01,
        waits=True,
        micro_batch=None,
        collectives=(wait,),
    )
    stack = SharedStack(workers=("rank 1 on b",), lines=("train.py, line 40 in load",))
    stood = made("stacks_taken", of_generation=1, workers=(hangs, waits), stacks=(stack,), missing=2)
    assert isinstance(stood, StacksTaken)
    assert list(explanation_lines(Explanation(event=stood, stood=stood)))[1:] == [
        "  rank 1 on b is at 'compute' of step 7, micro-batch 3 for 0.750 s",
        "  rank 0 on a is at 'reducing' of step 7: waits in all_to_all of 3 ranks, 64 bytes, for 0.500 s",
        "  rank 1 on b:",
        "    train.py, line 40 in load",
        "  and 2 more workers",
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("first", "e.jsonl"), "SEQ is 'first': give an event's number"),
        (("99", "FILE"), "there is no event 99"),
        (("9", "none.jsonl"), "none.jsonl cannot be read"),
    ],
)
def test_bad_input_is_refused(words: tuple[str, ...], complaint: str, file: Path) -> None:
    result = CliRunner().invoke(app, ["explain", *(str(file) if word == "FILE" else word for word in words)])
    assert isinstance(result.exception, BadInputError)
    assert complaint in str(result.exception)


def test_the_reason_for_the_recovery_action_is_shown() -> None:
    event = made("step_committed", 1.0, seq=2, step=1, samples=8, world_size=2, step_s=1.0)
    told = Explanation(event=event, action="replace", chosen="a standby that takes over at once costs 0.00 s")
    lines = list(explanation_lines(told))
    assert lines[1:3] == ["recovered by: replace; state, 0.0 MB moved", f"  {told.chosen}"]


@pytest.mark.parametrize("about", ABOUT)
def test_every_operator_request_describes_the_necessary_action(about: str) -> None:
    words = describe(made("action_requested", who="operator", command="holdfast explain 7", about=about, about_seq=7))
    assert words.startswith("the operator should ")
    assert words.endswith(": holdfast explain 7")
    assert "look into it" not in words


def test_the_jobs_condition_describes_the_requested_action() -> None:
    facts = {"job": "j", "state": "waiting", "step": 1, "since": 0.0, "stands_s": 1.0, "usual_step_s": None, "why": "w"}
    asked = {"seq": 7, "who": "site", "about": "node_left", "command": "holdfast undrain n1"}
    lines = list(condition_lines(JobCondition(**facts, **asked)))
    assert "the site staff should repair that machine, and then let its node come back: holdfast undrain n1" in lines
