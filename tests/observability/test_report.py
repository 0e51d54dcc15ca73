"""What a job's events add up to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.progress import stamped
from holdfast.cli.report_plot import plot_events
from holdfast.errors import BadInputError
from holdfast.observability.report import committed_steps, make_report, read_events


def step(number: int, time: float, **fields: Any) -> dict[str, Any]:
    return {
        "event": "step_committed",
        "time": time,
        "step": number,
        "loss": 1.0 / number,
        "samples": 8,
        "seconds": 1.0,
        **fields,
    }


def test_adds_up_steps_and_recoveries() -> None:
    recovered = {
        "event": "recovered",
        "time": 5.5,
        "action": "shrink",
        "state_source": "none",
        "bytes_moved": 0,
        "down_s": 1.25,
    }
    events = [
        {"event": "job_started", "time": 0.0, "job": "j"},
        {"event": "node_joined", "time": 0.5, "node": "a"},
        {"event": "epoch_started", "time": 0.5, "reason": "start"},
        *[step(number, float(number)) for number in range(1, 5)],
        {"event": "failure_detected", "time": 4.25, "node": "b"},
        step(5, 5.5),
        recovered,
        {"event": "job_finished", "time": 6.0},
    ]
    report = make_report(events)
    assert (report.outcome, report.steps, report.samples, report.gaps) == ("finished", 5, 40, 0)
    assert report.seconds == 6.0
    assert report.median_step_s == 1.0
    assert report.productive == pytest.approx(4 / 4.5)
    (recovery,) = report.recoveries
    assert (recovery.nodes, recovery.down_s, recovery.extra_s) == (("b",), 1.25, 0.25)


def test_counts_skipped_steps_rebalances_and_waits() -> None:
    events = [
        {"event": "job_started", "time": 0.0, "job": "j"},
        step(1, 1.0),
        {"event": "rebalanced", "time": 1.5},
        step(2, 2.0, skipped=True),
        {"event": "job_waiting", "time": 3.0},
        {"event": "job_waiting", "time": 4.0},
        {"event": "epoch_started", "time": 7.0, "reason": "join"},
        {"event": "job_waiting", "time": 8.0},
        {"event": "node_joined", "time": 8.5, "node": "a"},
    ]
    report = make_report(events)
    assert (report.skipped, report.rebalances, report.waiting_s) == (1, 1, 4.5)


def test_steps_undone_by_a_roll_back_do_not_count() -> None:
    events = [*[step(n, float(n)) for n in (1, 2, 3)], {"event": "rolled_back", "to_step": 1, "time": 4.0}]
    events += [step(2, 5.0), step(3, 6.0)]
    assert [(e["step"], e["time"]) for e in committed_steps(events)] == [(1, 1.0), (2, 5.0), (3, 6.0)]
    assert make_report(events).gaps == 0


def test_a_loss_that_nobody_knows_is_no_number(tmp_path: Path) -> None:
    events = [{"event": "job_started", "time": 0.0, "job": "j"}, step(1, 1.0, loss=None), step(2, 2.0)]
    assert make_report(events).first_loss is None
    plot_events(events, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0
    words = {"event": "step_committed", "samples": 1, "seconds": 1.0, "world": 1, "step": 1, "loss": None, "time": 0.0}
    assert "loss -" in stamped(words)


def test_a_missing_step_is_seen() -> None:
    assert make_report([step(1, 1.0), step(3, 2.0)]).gaps == 1


def test_reads_complete_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(step(1, 1.0)) + "\n" + '{"event": "step_com')
    assert [event["step"] for event in read_events(path)] == [1]


@pytest.mark.parametrize("text", ["", "no json\n", "[1]\n", '{"time": 1}\n'])
def test_refuses_what_is_no_event_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    with pytest.raises(BadInputError, match=r"events\.jsonl"):
        read_events(path)
