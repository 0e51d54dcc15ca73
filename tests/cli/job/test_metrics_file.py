"""Tests of a running job's metrics file: a full disk does not end the job, and is reported once."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from holdfast.cli.following.show import write_metrics_to
from holdfast.observability import metric_rows
from holdfast.protocol.events import ReadEvent
from made_events import made


class SmallDisk(io.FileIO):
    """A file on a disk with little room."""

    room = 0

    def write(self, data: object, /) -> int:
        assert isinstance(data, bytes | memoryview)
        taken = bytes(data)[: SmallDisk.room]
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        SmallDisk.room -= len(taken)
        return super().write(taken)


def step(number: int) -> ReadEvent:
    known = {"step": number, "loss": 1.0 / number, "samples": 6, "grad_norm": 0.5}
    return made("step_committed", float(number), **known, metrics={})


EVENTS = (
    *(step(number) for number in range(1, 5)),
    made("evaluated", 4.25, name="eval", step=2, samples=9, metrics={"accuracy": 0.5}),
    made("job_waiting"),
    made("rolled_back", to_step=3),
    *(step(number) for number in range(4, 7)),
)


def write(path: Path, seen: list[ReadEvent], *, full_from: int = 99, full_until: int = 99, room: int = 0) -> None:
    """Write all events. From event `full_from` until `full_until` the disk has only `room` bytes left."""
    with write_metrics_to(str(path), seen.append) as told:
        for number, event in enumerate(EVENTS):
            if number == full_from:
                SmallDisk.room = room
            elif number == full_until:
                SmallDisk.room = 1 << 20
            told(event)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_unwritten_rows_are_written_once_the_disk_has_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    monkeypatch.setattr(metric_rows, "open", lambda file, *_, **__: SmallDisk(file, "r+b"), raising=False)
    SmallDisk.room = 1 << 20
    write(calm := tmp_path / f"calm.{ending}", [])
    for full_from in range(len(EVENTS) - 1):
        for room in (0, 1, 50, 130):
            SmallDisk.room = 1 << 20
            path, seen = tmp_path / f"{full_from}-{room}.{ending}", list[ReadEvent]()
            write(path, seen, full_from=full_from, full_until=len(EVENTS) - 1, room=room)
            assert path.read_bytes() == calm.read_bytes(), (full_from, room)
            assert seen == list(EVENTS)
            assert capsys.readouterr().err.count("cannot be written") <= 1


def test_a_full_disk_is_reported_once_with_the_missing_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk once ended the job with a traceback, as an internal error."""
    monkeypatch.setattr(metric_rows, "open", lambda file, *_, **__: SmallDisk(file, "r+b"), raising=False)
    SmallDisk.room = 1 << 20
    seen = list[ReadEvent]()
    write(tmp_path / "rows.jsonl", seen, full_from=2)
    assert seen == list(EVENTS)
    first, last = capsys.readouterr().err.splitlines()
    assert "rows.jsonl cannot be written: No space left on device; training goes on" in first
    assert "lacks 7 events" in last
    assert "holdfast export" in last
