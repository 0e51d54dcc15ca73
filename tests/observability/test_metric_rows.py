"""One row per step, once and in order, despite repeated events, rollbacks, and an earlier file."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import BadInputError
from holdfast.observability.metric_rows import FORMATS, MetricWriter, csv_file, json_lines, writer_for
from holdfast.protocol.events import CoordinatorRestarted, FailureDetected, ReadEvent
from made_events import made
from tests.simulation.cluster import SimCluster
from tests.simulation.faults.plans import Fault, FaultKind, FaultPlan


def step(number: int, **metrics: float | None) -> ReadEvent:
    known = {"step": number, "loss": 1.0 / number, "samples": 6, "grad_norm": 0.5}
    return made("step_committed", float(number), **known, metrics=metrics)


def found(number: int, **metrics: float | None) -> ReadEvent:
    return made("evaluated", number + 0.25, name="eval", step=number, samples=9, metrics=metrics)


def back(to: int) -> ReadEvent:
    return made("rolled_back", to_step=to)


def written(path: Path, *events: ReadEvent) -> list[dict[str, Any]]:
    writer = MetricWriter(json_lines(path))
    for event in events:
        writer.on_event(event)
    writer.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_has_the_steps_loss_and_its_logged_metrics(tmp_path: Path) -> None:
    (row,) = written(tmp_path / "rows", made("job_started", 0.5), step(1, accuracy=0.5, doubtful=None))
    assert row == {
        "step": 1,
        "time": 1.0,
        "loss": 1.0,
        "grad_norm": 0.5,
        "samples": 6,
        "metrics": {"accuracy": 0.5, "doubtful": None},
    }


def test_repeated_steps_are_written_once_and_a_rollback_removes_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    once = [step(number, value=number) for number in range(1, 6)]
    rows = written(path, *once, *once[2:], back(3), step(4, value=40), step(5, value=50))
    assert [(row["step"], row["metrics"]["value"]) for row in rows] == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50)]


def test_an_existing_file_is_continued_after_a_crash_or_a_resume(tmp_path: Path) -> None:
    """The previous writer was killed inside a line; the journal is then read from its start, or the job resumes."""
    path = tmp_path / "rows"
    events = [step(number) for number in range(1, 5)]
    written(path, *events)
    with path.open("ab") as file:
        file.write(b'{"step":5,"ti')
    assert [row["step"] for row in written(path, *events, step(5))] == [1, 2, 3, 4, 5]
    resumed = [made("job_started", 0.5), back(3), step(4, later=1.0), step(5)]
    rows = written(path, *resumed)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[3]["metrics"] == {"later": 1.0}


def test_an_evaluations_result_is_in_the_row_of_its_own_step(tmp_path: Path) -> None:
    """The evaluation's event may come early, late or repeatedly; only its own step's row has the result."""
    once = [step(1), found(2, loss=2.0), step(2, fine=0.5), step(3, **{"eval/loss": 2.0}), step(4), found(4, loss=4.0)]
    path, expected = (
        tmp_path / "rows",
        [(1, {}), (2, {"fine": 0.5, "eval/loss": 2.0}), (3, {}), (4, {"eval/loss": 4.0})],
    )
    for events in (once, once, [*once, *once[3:]], [*once, found(2, loss=2.0)]):
        rows = written(path, *events)
        assert [(row["step"], row["metrics"]) for row in rows] == expected
    late = [step(5), step(6), found(5, loss=5.0, doubtful=None), back(5), step(6), found(6, loss=6.0)]
    rows = written(path, *late)
    five, six = {"eval/loss": 5.0, "eval/doubtful": None}, {"eval/loss": 6.0}
    assert [(row["step"], row["metrics"]) for row in rows] == [*expected, (5, five), (6, six)]


def test_evaluations_of_undone_steps_are_removed(tmp_path: Path) -> None:
    rows = written(tmp_path / "rows", step(1), step(2), found(2, loss=9.0), back(1), step(2), found(2, loss=2.0))
    assert [row["metrics"] for row in rows] == [{}, {"eval/loss": 2.0}]
    rows = written(tmp_path / "rows", back(1), step(2))
    assert [row["metrics"] for row in rows] == [{}, {}]


def test_an_evaluation_after_a_resume_is_added_to_an_earlier_row(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.csv"):
        for events in ((step(1), step(2)), (found(2, loss=2.0), step(3)), (found(2, loss=2.0), step(3))):
            writer = writer_for(tmp_path / name)
            for event in events:
                writer.on_event(event)
            writer.close()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["step"], row["metrics"]) for row in rows] == [(1, {}), (2, {"eval/loss": 2.0}), (3, {})]
    lines = (tmp_path / "rows.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == ["1", "1", "2", "2", "2", "3", "3"]
    assert lines[4] == "2,2.25,eval/loss,2.0"


def test_csv_has_a_line_for_each_value(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for _ in range(2):
        writer = MetricWriter(csv_file(path))
        for event in (step(1, doubtful=None), step(2, **{'a "name",\nodd': 3.0}), back(1), step(2, fine=0.5)):
            writer.on_event(event)
        writer.close()
    with path.open() as file:
        lines = list(csv.reader(file))
    assert lines == [
        ["step", "time", "name", "value"],
        ["1", "1.0", "loss", "1.0"],
        ["1", "1.0", "grad_norm", "0.5"],
        ["1", "1.0", "doubtful", ""],
        ["2", "2.0", "loss", "0.5"],
        ["2", "2.0", "grad_norm", "0.5"],
        ["2", "2.0", "fine", "0.5"],
    ]


@pytest.mark.parametrize(
    ("text", "why"), [("no JSON\n", "has a line without a step"), ("", "cannot be written: Is a directory")]
)
def test_a_file_that_is_not_a_metrics_file_is_refused_and_unchanged(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "other"
    if text:
        path.write_text(text)
    else:
        path.mkdir()
    with pytest.raises(BadInputError, match=why):
        json_lines(path)
    if text:
        assert path.read_text() == text
        with pytest.raises(BadInputError, match="does not begin as a metrics file of this format"):
            csv_file(path)


def test_the_file_suffix_selects_the_format(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.csv"):
        writer = writer_for(tmp_path / name)
        writer.on_event(step(1))
        writer.close()
    assert (tmp_path / "rows.csv").read_text().startswith("step,time")
    assert (tmp_path / "rows.jsonl").read_text().startswith('{"step":1')
    with pytest.raises(BadInputError, match=r"has an unknown suffix: use \.jsonl or \.csv"):
        writer_for(tmp_path / "rows.xlsx")


def test_500_steps_with_faults_and_a_coordinator_crash_give_500_rows(tmp_path: Path) -> None:
    kinds = (FaultKind.KILL_NODE, FaultKind.KILL_WORKER)
    faults = tuple(Fault(kind=kinds[n % 2], time=2.0 + 5.0 * n, target=n) for n in range(10))
    dies = Fault(kind=FaultKind.CRASH_COORDINATOR, time=20.0)
    joins = tuple(Fault(kind=FaultKind.JOIN, time=3.5 + 5.0 * n) for n in range(10))
    plan = FaultPlan(seed=17, nodes=4, start_nodes=4, steps=500, logs=True, faults=(*faults, *joins, dies))
    cluster = SimCluster(plan)
    cluster.run()
    events = cluster.world.journal.events
    assert sum(isinstance(event, FailureDetected) for event in events) >= 5
    assert any(isinstance(event, CoordinatorRestarted) for event in events)
    rows = written(tmp_path / "rows", *events[:900], *events[300:])
    assert [row["step"] for row in rows] == list(range(1, 501))
    assert all(row["metrics"].keys() == {"doubtful", "mean"} for row in rows)


class Recorder:
    """Replaces TensorBoard's writer, which has an interface of two methods."""

    scalars: list[tuple[str, int, Any]]

    def __init__(self, folder: str) -> None:
        Recorder.scalars = []

    def add_event(self, event: SimpleNamespace) -> None:
        purges = hasattr(event, "session_log")
        values = None if purges else {value.tag: value.simple_value for value in event.summary.value}
        Recorder.scalars.append(("purge" if purges else "step", event.step, values))

    def close(self) -> None:
        Recorder.scalars.append(("close", 0, None))


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    log, summary = type("SessionLog", (SimpleNamespace,), {"START": 1}), type("Summary", (SimpleNamespace,), {})
    summary.Value = SimpleNamespace
    modules = {
        "tensorboard.summary.writer.event_file_writer": {"EventFileWriter": Recorder},
        "tensorboard.compat.proto.event_pb2": {"Event": SimpleNamespace, "SessionLog": log},
        "tensorboard.compat.proto.summary_pb2": {"Summary": summary},
    }
    for name, inside in modules.items():
        module = ModuleType(name)
        module.__dict__.update(inside)
        parts = name.split(".")
        for number in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:number]), ModuleType(parts[number - 1]))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_purges_old_values_before_steps_are_written_again(tmp_path: Path) -> None:
    writer = MetricWriter(FORMATS["tensorboard"](tmp_path / "runs"))
    for event in (step(1, fine=0.5), found(2, loss=2.0), step(2, doubtful=None), found(1, loss=1.0), back(1), step(2)):
        writer.on_event(event)
    writer.close()
    assert Recorder.scalars == [
        ("purge", 1, None),
        ("step", 1, {"loss": 1.0, "grad_norm": 0.5, "fine": 0.5}),
        ("step", 2, {"loss": 0.5, "grad_norm": 0.5, "eval/loss": 2.0}),
        ("step", 1, {"eval/loss": 1.0}),
        ("purge", 2, None),
        ("step", 2, {"loss": 0.5, "grad_norm": 0.5}),
        ("close", 0, None),
    ]


def test_a_missing_tensorboard_is_reported_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(BadInputError, match=r"pip install holdfast\[tensorboard\]"):
        FORMATS["tensorboard"](tmp_path)
