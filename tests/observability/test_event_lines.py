"""Reading events back: all known kinds, kinds of older and newer versions, and invalid lines."""

from __future__ import annotations

import json
from math import nan
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import BadInputError
from holdfast.observability.event_lines import NoEventError, decode_event, last_number, read_events
from holdfast.protocol.events import OtherEvent, StepCommitted, name_of
from made_events import KINDS, made

NEWER = {
    "event": "born_later",
    "time": 5,
    "job": "j",
    "term": 2,
    "generation": 3,
    "seq": 4,
    "why": "new",
    "x": {"y": [1]},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_event_kind_is_decoded_as_it_was_encoded(name: str) -> None:
    event = made(name, 1.5, job="j", term=2, generation=3, seq=4)
    assert decode_event(msgspec.json.encode(event)) == event
    assert name_of(event) == name


def test_a_nan_loss_is_decoded_as_none() -> None:
    event = decode_event(msgspec.json.encode(made("step_committed", loss=nan)))
    assert isinstance(event, StepCommitted)
    assert event.loss is None


def test_unknown_fields_of_a_newer_version_are_ignored() -> None:
    line = {**json.loads(msgspec.json.encode(made("node_left", node="a"))), "born_later": [1]}
    assert decode_event(json.dumps(line)) == made("node_left", node="a")


def test_an_unknown_event_of_a_newer_version_keeps_all_its_fields() -> None:
    event = decode_event(json.dumps(NEWER))
    assert isinstance(event, OtherEvent)
    assert (name_of(event), event.time, event.job, event.generation, event.seq) == ("born_later", 5.0, "j", 3, 4)
    assert event.fields == NEWER


def test_fields_missing_in_an_older_event_have_their_defaults() -> None:
    line = '{"event":"step_committed","time":1,"job":"j","term":1,"generation":1,"seq":9,"step":1,"loss":2,"samples":8,'
    event = decode_event(line + '"world_size":2,"step_s":0.5}')
    assert isinstance(event, StepCommitted)
    assert not event.skipped


def test_an_incomplete_last_line_is_skipped_and_logged(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(msgspec.json.encode(made("job_failed")) + b'\n{"event": "step_com')
    logged: list[str] = []
    assert read_events(path, logged.append) == [made("job_failed")]
    assert logged == [f"{path}, line 2 is left out: it is incomplete (its writer is still writing it, or was killed)"]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1]",
        '{"time": 1}',
        '{"event": "node_left", "time": 1, "job": "j", "term": 1, "generation": 1}',
        '{"event": "node_left", "time": "now", "job": "j", "term": 1, "generation": 1, "node": "a", "reason": "r"}',
        '{"event": "\udcff"}',
        "[" * 10_000,
    ],
)
def test_a_line_that_is_not_an_event_is_refused(tmp_path: Path, line: Any) -> None:
    data = line.encode(errors="surrogateescape")
    with pytest.raises(NoEventError):
        decode_event(data)
    path = tmp_path / "events.jsonl"
    path.write_bytes(msgspec.json.encode(made("job_started")) + b"\n" + data + b"\n")
    with pytest.raises(BadInputError, match=r"events\.jsonl, line 2 is not an event"):
        read_events(path)


def test_a_file_without_events_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for text in ("", '{"event"'):
        path.write_text(text)
        with pytest.raises(BadInputError, match="no event yet"):
            read_events(path)
    with pytest.raises(BadInputError, match=r"cannot be read as an event file: Is a directory; give the file that"):
        read_events(tmp_path)


def test_the_number_of_the_last_complete_event_is_found(tmp_path: Path) -> None:
    file = tmp_path / "e.jsonl"
    assert last_number(file) == 0, "the file must not exist"
    lines = [msgspec.json.encode(made("step_committed", seq=seq)) + b"\n" for seq in range(1, 9001)]
    file.write_bytes(b"".join(lines) + lines[-1][:20])
    assert file.stat().st_size > 1 << 20
    assert last_number(file) == 9000
    file.write_bytes(b"".join(lines[:3]) + b"\0" * 50)
    assert last_number(file) == 3
