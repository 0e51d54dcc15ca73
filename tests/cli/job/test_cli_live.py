"""Tests of events shown as text and in the live panel."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from holdfast.cli.following.live import JobPicture, LiveProgress, can_animate, render
from holdfast.cli.following.progress import PlainProgress, describe, describe_with_time, loss_text
from holdfast.cli.following.show import filter_this_run
from holdfast.cli.history.report import print_report
from holdfast.observability.event_lines import decode_event
from holdfast.observability.report import make_report
from holdfast.protocol.events import NodesJoined, ReadEvent
from holdfast.protocol.plan import JoinedNode
from made_events import KINDS, joined, made


def event(name: str, /, time: float = 1000.0, **fields: Any) -> ReadEvent:
    return made(name, time, **{"job": "j", "term": 1, "generation": 1, "seq": 1, **fields})


def step(number: int, time: float = 1000.0, seconds: float = 0.5, last_step: int = 0) -> ReadEvent:
    facts = {"step": number, "loss": 2.5, "samples": 32, "world_size": 4, "step_s": seconds, "last_step": last_step}
    return event("step_committed", time, **facts)


STORY = [
    event("job_started", url="http://127.0.0.1:1", coordinator_pid=9),
    joined("node-0", 0.0, agent_pid=10, worker_pids=(11,), job="j", term=1, generation=1, seq=1),
    joined("node-1", 0.0, agent_pid=20, worker_pids=(21,), job="j", term=1, generation=1, seq=1),
    event("generation_started", members=("node-0", "node-1"), world_size=2, reason="start"),
    step(1, seconds=0.0),
    step(2),
    event("failure_detected", node="node-1", kind="connection_lost", after_s=0.001, detail=""),
    event("node_left", node="node-1", reason="failed"),
    event("generation_started", generation=2, members=("node-0",), world_size=1, reason="failure"),
    event(
        "recovered",
        action="shrink",
        state_source="none",
        moved_bytes=0,
        detect_s=0.001,
        decide_s=0.0,
        regroup_s=0.02,
        transfer_s=0.0,
        redo_s=0.03,
        down_s=0.051,
    ),
    event("workers_changed", node="node-0", worker_pids=(12,)),
]


def picture(events: list[ReadEvent]) -> JobPicture:
    found = JobPicture()
    for one in events:
        found.on_event(one)
    return found


def drawn(found: JobPicture, *, on_ctrl_c: str = "", width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(found, on_ctrl_c=on_ctrl_c))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_live_view_state_follows_the_jobs_events() -> None:
    found = picture(STORY)
    assert (found.step, found.loss, found.world) == (2, 2.5, 1)
    assert found.rate.samples_per_s == pytest.approx(64.0)
    assert not found.rate.time_left(2, 0), "the script has not set its number of steps"
    found.on_event(step(3, last_step=10))
    assert found.rate.time_left(3, 10) == "3.5 s left"
    assert found.nodes == {"node-0": "training", "node-1": "left (failed)"}


def test_the_panel_shows_progress_nodes_last_event_and_ctrl_c_action() -> None:
    found = picture(STORY[:-1])
    found.last_step = 100
    lines = [line.strip("│ ") for line in drawn(found, on_ctrl_c="ends the job").splitlines()]
    assert lines[0].startswith("╭─ holdfast j http://127.0.0.1:1 ─")
    assert set(lines[1]) == {"━"}, "the bar is at 2 %; its rest differs only in color"
    assert lines[2] == "step 2 of 100   loss 2.5000   64.0 samples/s   1 worker   49 s left"
    assert lines[3:5] == ["training: node-0", "left (failed): node-1"]
    assert lines[5].startswith("last event: ")
    assert lines[5].endswith("recovered by shrink, down 0.051 s (detect 0.001 s, regroup 0.020 s, redo 0.030 s)")
    assert lines[6] == "Ctrl-C: ends the job"


@pytest.mark.parametrize("width", [10, 40, 80])
def test_no_line_of_the_panel_wraps(width: int) -> None:
    found = picture(STORY)
    found.nodes |= {f"node-{number}": "training" for number in range(1000)}
    assert len(drawn(found, width=width, on_ctrl_c="saves the job and ends it").splitlines()) <= 9


def test_a_live_view_without_events_can_be_drawn() -> None:
    assert "step 0" in drawn(JobPicture())


@pytest.mark.parametrize(("term", "animated"), [("xterm", True), ("dumb", False), ("unknown", False)])
def test_a_dumb_terminal_gets_plain_lines(term: str, animated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", term)
    assert can_animate() is animated
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    assert not can_animate()


def test_the_live_view_prints_events_above_the_panel() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with LiveProgress(console) as progress:
        for one in [*STORY, event("job_failed", why="nothing is left")]:
            progress(one)
    assert progress.failure == "nothing is left"
    assert isinstance(console.file, io.StringIO)
    assert "recovered by shrink" in console.file.getvalue(), "events are printed above the panel"


def test_output_of_the_process_and_its_children_is_captured_as_lines(tmp_path: Path) -> None:
    script = """
import os, subprocess, sys
from holdfast.cli.following.live import terminal_apart
lines = []
with terminal_apart() as (console, begin):
    begin(lines.append)
    print("mine", flush=True)
    subprocess.run(["sh", "-c", "echo child; printf 'odd \\033[2J' >&2"], check=True)
    console.print("terminal")
print(lines)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "terminal\n['mine', 'child', 'odd \\\\x1b[2J']\n"


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (step(3), "step 3: loss 2.5000, 64.0 samples/s, 4 workers"),
        (step(3, seconds=0.0), "step 3: loss 2.5000, - samples/s, 4 workers"),
        (STORY[9], "recovered by shrink, down 0.051 s (detect 0.001 s, regroup 0.020 s, redo 0.030 s)"),
        (event("node_left", node="n", reason="drained"), "n left: drained"),
        (
            event("evaluated", name="eval", step=5, samples=9, metrics={"loss": 0.25, "odd": None}),
            "eval of step 5: loss 0.25, odd -",
        ),
        (
            event("checkpoint_saved", step=5, save_s=0.25, saved_bytes=2_000_000),
            "checkpoint of step 5: 2.0 MB in 0.25 s",
        ),
        (event("job_finished", steps=9, samples=288, final_loss=1.25), "done: 9 steps, 288 samples, loss 1.2500"),
    ],
)
def test_events_are_described_as_text(one: ReadEvent, words: str) -> None:
    assert describe(one) == words


def test_an_event_of_an_unknown_kind_is_shown_unchanged() -> None:
    later = decode_event('{"event": "born_later", "time": 1, "x": 7}')
    assert describe(later) == "{'event': 'born_later', 'time': 1, 'x': 7}"
    assert "born_later" in drawn(picture([*STORY, later]))
    lines: list[str] = []
    PlainProgress(lines.append)(later)
    assert "born_later" in lines[0]


@pytest.mark.parametrize("time", [1000.0, 1e18, -1e18, 1e300])
def test_an_event_with_control_characters_is_printed_as_one_line(time: float) -> None:
    why = "a script said:\n\x1b[2Jall is well\r\n"
    line = describe_with_time(event("job_failed", time, why=why))
    assert line.isprintable()
    assert line.endswith(r" failed: a script said: \x1b[2Jall is well")


def test_a_report_does_not_interpret_markup_in_names() -> None:
    console = Console(file=io.StringIO(), width=120)
    print_report(make_report([event("job_started", url="u", coordinator_pid=1, job="[/bold] [x]")]), console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith("[/bold] [x]: running")


@pytest.mark.parametrize("name", KINDS)
def test_every_event_kind_has_a_description(name: str) -> None:
    words = describe(event(name))
    assert words
    assert "event" not in words


def test_plain_progress_prints_one_line_every_10_seconds() -> None:
    lines: list[str] = []
    progress = PlainProgress(lines.append)
    progress(STORY[3])
    for number in range(101):
        progress(step(number + 1, time=1000.0 + number / 4))
    assert [line.split(" ", 1)[1] for line in lines if "step" in line] == [
        "step 1: loss 2.5000, 64.0 samples/s, 2 nodes",
        "step 41: loss 2.5000, 64.0 samples/s, 2 nodes",
        "step 81: loss 2.5000, 64.0 samples/s, 2 nodes",
    ]


def test_plain_progress_shows_the_last_step_and_time_left_if_known() -> None:
    lines: list[str] = []
    progress = PlainProgress(lines.append)
    for number in range(41):
        progress(step(number + 1, time=1000.0 + number / 4, seconds=0.25, last_step=100))
    assert lines[-1].endswith("step 41 of 100: loss 2.5000, 128.0 samples/s, 4 workers, 15 s left")
    progress(step(100, time=2000.0, last_step=100))
    assert lines[-1].endswith("step 100 of 100: loss 2.5000, 64.0 samples/s, 4 workers")


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (None, "-"),
        (2.5, "2.5000"),
        (0.0, "0.0000"),
        (1e-6, "1.000e-06"),
        (-1e300, "-1.000e+300"),
        (float("nan"), "nan"),
    ],
)
def test_a_loss_of_any_magnitude_is_printed_in_a_short_form(loss: float | None, words: str) -> None:
    assert loss_text(loss) == words


def test_steps_with_implausible_times_or_counts_show_no_time_left() -> None:
    lines: list[str] = []
    progress = PlainProgress(lines.append)
    steps = [step(1, 0.0, 0.0, 9), step(2, 20.0, 1e300, 10**18), step(9, 40.0, 0.5, 3), step(9, 60.0, float("nan"), 99)]
    for one in steps:
        progress(one)
        assert "left" not in drawn(picture([one]))
    assert len(lines) == len(steps)
    assert not [line for line in lines if "left" in line]


def test_progress_continues_after_the_clock_is_set_back() -> None:
    lines: list[str] = []
    progress = PlainProgress(lines.append)
    for number, time in enumerate((5000.0, 5001.0, 100.0, 101.0, 111.0)):
        progress(step(number, time))
    assert [int(re.findall(r"step (\d)", line)[0]) for line in lines] == [0, 2, 4]


def test_the_time_left_includes_lost_steps_after_a_rollback() -> None:
    lines: list[str] = []
    progress = PlainProgress(lines.append)
    for one in (step(90, 0.0, 1.0, 100), step(50, 20.0, 1.0, 100)):
        progress(one)
    assert [line.split(", ")[-1] for line in lines] == ["10 s left", "50 s left"]


def test_control_characters_in_a_nodes_state_do_not_break_the_panel() -> None:
    lines = drawn(picture([event("node_left", node="node-0", reason="a\nb\x1b[31m")])).splitlines()
    assert not [line for line in lines if line and line[0] not in "╭│╰"]
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("verbose", [True, False])
def test_detailed_events_are_printed_only_in_verbose_mode(verbose: bool) -> None:
    lines: list[str] = []
    progress = PlainProgress(lines.append, verbose=verbose)
    for name in ("flop_counted", "memory_sampled", "rebalanced", "recovered"):
        progress(event(name))
    assert len(lines) == (4 if verbose else 1)


def test_plain_progress_prints_at_most_one_step_per_interval() -> None:
    lines: list[str] = []
    progress = PlainProgress(lines.append, every_s=1.0)
    for number in range(1, 31):
        progress(step(number, time=1000.0 + number / 10))
    progress(event("job_failed", why="nothing is left"))
    steps = [line for line in lines if "step" in line]
    assert len(steps) == 3
    assert progress.failure == "nothing is left"


def test_many_nodes_that_join_together_are_described_in_one_short_line() -> None:
    nodes = tuple(JoinedNode(node=f"n{number}", agent_pid=1, worker_pids=(2,)) for number in range(1000))
    event = NodesJoined(nodes=nodes, time=0.0, job="j", term=1, generation=0, seq=1)
    assert describe(event) == "1000 nodes joined: n0, n1, n2, n3, n4, n5, n6, n7 and 992 more"


RESUMES = [
    event("coordinator_restarted", url="u", coordinator_pid=1),
    event("rolled_back", to_step=50, why="the job resumes from its checkpoint"),
]


@pytest.mark.parametrize("pause", [RESUMES, [event("job_waiting", nodes=1, expert_slots=0, why="no node is left")]])
def test_the_sample_rate_is_measured_again_after_a_pause(pause: list[ReadEvent]) -> None:
    lines: list[str] = []
    progress, found = PlainProgress(lines.append), picture([])
    steps = [step(number, number / 10, 0.1, 100) for number in range(1, 51)]
    later = [step(51, 1000.0, 900.0, 100), step(52, 1000.5, 0.5, 100), step(53, 1011.0, 0.5, 100)]
    for one in [*steps, *pause, *later]:
        progress(one)
        found.on_event(one)
    told = [line.split(" ", 1)[1] for line in lines if "samples/s" in line]
    assert told[1:] == [
        "step 51 of 100: loss 2.5000, - samples/s, 4 workers",
        "step 53 of 100: loss 2.5000, 64.0 samples/s, 4 workers, 24 s left",
    ]
    assert "64.0 samples/s" in drawn(found)
    assert "24 s left" in drawn(found)


def test_only_events_of_the_current_run_are_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "e.jsonl"
    before = [event("job_started", url="u", coordinator_pid=1, seq=1), event("node_left", node="n", reason="r", seq=2)]
    file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in before))
    told: list[ReadEvent] = []
    tell = filter_this_run(str(file), told.append)
    again = event("coordinator_restarted", url="u", coordinator_pid=1, seq=3)
    for one in [*before, again]:
        tell(one)
    assert told == [again]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"steps": 1, "samples": 1, "final_loss": 2.0}, "done: 1 step, 1 sample, loss 2.0000"),
        (
            {"steps": 300, "samples": 256, "samples_since": 268, "final_loss": 2.0},
            "done: 300 steps, 256 samples since the resume at step 268, loss 2.0000",
        ),
        ({"steps": 300, "samples_since": 300}, "the job was already finished at step 300"),
        ({"why": "ended by SIGINT", "resumable": True}, "stopped (ended by SIGINT): 0 steps, 0 samples"),
    ],
)
def test_a_finished_job_is_described_with_its_steps_and_samples(facts: dict[str, Any], words: str) -> None:
    assert describe(event("job_finished", **facts)) == words


def test_a_finished_job_that_is_run_again_is_reported_as_finished() -> None:
    lines: list[str] = []
    progress = PlainProgress(lines.append)
    back = event("rolled_back", to_step=300, why="the job resumes from its checkpoint")
    for one in (RESUMES[0], back, event("job_finished", steps=300, samples=2400, final_loss=2.0)):
        progress(one)
    assert lines[-1].endswith(" the job was already finished at step 300")


def test_lines_above_the_panel_wrap_at_words() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    with LiveProgress(console) as progress:
        progress(event("rebalanced", experts_moved=4, down_s=0.5))
        progress(event("generation_started", members=("node-0", "node-1"), world_size=2, reason="rebalance"))
    assert isinstance(console.file, io.StringIO)
    printed = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", printed)]
    assert max(map(len, lines)) <= 40
    assert any(line.endswith("(rebalance)") for line in lines), "no word is broken"
