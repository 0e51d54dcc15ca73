"""The journal: order, limits and followers; on disk: torn ends, fences and checksums."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import BadInputError
from holdfast.observability import journal_file
from holdfast.observability.journal import Journal, JournalError, JournalTakenError
from holdfast.observability.journal_file import FileJournal, PoolJournal
from holdfast.protocol import events as ev
from holdfast.protocol.events import JournalRepaired
from holdfast.protocol.pool.events import PoolStarted
from holdfast.protocol.position import Position
from made_events import made


class Event(ev.Event, frozen=True, kw_only=True, tag_field="event", tag="something"):
    """An event of a kind that this version does not know."""

    time: float = 0.0
    job: str = "j"
    term: int = 1
    generation: int = 0


def _numbers(lines: list[bytes]) -> list[int]:
    return [json.loads(line)["seq"] for line in lines]


Make = Callable[[], Journal]


@pytest.fixture(params=["memory", "file"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    return Journal() if request.param == "memory" else FileJournal(tmp_path / "events.jsonl")


def test_events_are_read_in_order(journal: Journal) -> None:
    for seq in range(1, 6):
        assert journal.append(Event(seq=seq, time=seq / 2))
    assert journal.last_seq == 5
    assert _numbers(journal.read(0)) == [1, 2, 3, 4, 5]
    assert _numbers(journal.read(3)) == [4, 5]
    assert journal.read(5) == []
    assert journal.read(99) == []
    assert _numbers(journal.read(1, limit=2)) == [2, 3]
    read = json.loads(journal.read(4)[0])
    assert read == {"event": "something", "seq": 5, "time": 2.5, "job": "j", "term": 1, "generation": 0}
    journal.close()


def test_known_events_are_skipped_and_gaps_are_refused(journal: Journal) -> None:
    journal.append(Event(seq=1))
    journal.append(Event(seq=2))
    assert not journal.append(Event(seq=1))
    assert not journal.append(Event(seq=2, time=9.0))
    with pytest.raises(JournalError, match="event 4 cannot follow event 2"):
        journal.append(Event(seq=4))
    assert _numbers(journal.read(0)) == [1, 2]
    journal.close()


def test_a_closed_journal_refuses_new_events(journal: Journal) -> None:
    journal.append(Event(seq=1))
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.append(Event(seq=2))
    assert _numbers(journal.read(0)) == [1]


def test_memory_is_bounded_and_older_events_are_read_from_the_file(tmp_path: Path) -> None:
    memory, file = Journal(recent=10), FileJournal(tmp_path / "events.jsonl", recent=10)
    for seq in range(1, 1001):
        memory.append(Event(seq=seq))
        file.append(Event(seq=seq))
    assert _numbers(memory.read(0)) == list(range(991, 1001))
    for after, limit in itertools.product((0, 1, 255, 256, 257, 511, 512, 985, 990, 999, 1000), (1, 7, 1000)):
        assert _numbers(file.read(after, limit)) == list(range(after + 1, 1001))[:limit]
    file.close()
    again = FileJournal(tmp_path / "events.jsonl", recent=10)
    assert _numbers(again.read(500, 4)) == [501, 502, 503, 504]
    again.close()


def test_a_follower_wakes_up_at_each_event_and_at_the_close(journal: Journal) -> None:
    async def follow() -> list[int]:
        seen: list[int] = []
        while not journal.closed or journal.last_seq > len(seen):
            await journal.wait_beyond(len(seen), 60.0)
            seen += _numbers(journal.read(len(seen)))
        return seen

    async def main() -> list[list[int]]:
        followers = [asyncio.create_task(follow()) for _ in range(3)]
        for seq in range(1, 6):
            await asyncio.sleep(0)
            journal.append(Event(seq=seq))
        await asyncio.sleep(0)
        journal.close()
        return await asyncio.wait_for(asyncio.gather(*followers), 60.0)

    assert asyncio.run(main()) == [[1, 2, 3, 4, 5]] * 3


def test_waiting_for_an_event_ends_after_the_timeout(journal: Journal) -> None:
    asyncio.run(asyncio.wait_for(journal.wait_beyond(0, 0.01), 60.0))
    assert journal.last_seq == 0
    journal.close()


# ---- on disk ----


def test_every_event_is_written_to_the_file_immediately(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = FileJournal(path)
    for seq in range(1, 4):
        journal.append(Event(seq=seq))
        assert len(path.read_bytes().splitlines()) == seq
    journal.close()


def test_opening_a_journal_does_not_change_its_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    FileJournal(path).close()
    assert not path.exists()
    path.write_bytes(b'{"event":"something","time":0,"seq":1}\n{"event":"some')
    FileJournal(path).close()
    assert path.read_bytes() == b'{"event":"something","time":0,"seq":1}\n{"event":"some'


_history = st.lists(st.sampled_from(["step", "other", "generation", "back"]), max_size=30)


def _events(history: list[str]) -> tuple[list[ev.Event], Position]:
    """Return events made after a history, and the state after them, computed independently."""
    events: list[ev.Event] = []
    applied: list[int] = []
    last, last_loss = 0.0, 0.0
    for seq, kind in enumerate(history, 1):
        if kind == "step":
            applied.append(4)
            last, last_loss = seq * 1.5, 1 / seq
            events.append(made("step_committed", last, seq=seq, step=len(applied), loss=last_loss, samples=4))
        elif kind == "back":
            applied = applied[: len(applied) // 2]
            events.append(made("rolled_back", seq=seq, to_step=len(applied)))
        else:
            events.append(
                made("generation_started", seq=seq, generation=seq) if kind == "generation" else Event(seq=seq)
            )
    return events, Position(
        seq=len(events),
        step=len(applied),
        step_time=last,
        loss=last_loss,
        samples=sum(applied),
        step_samples=4 if "step" in history else 0,
    )


@given(history=_history, cut=st.integers(min_value=0, max_value=10_000))
@settings(max_examples=150, deadline=None)
def test_a_truncated_file_is_continued_after_its_last_complete_line(
    tmp_path_factory: pytest.TempPathFactory, history: list[str], cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.unlink(missing_ok=True)
    events, _ = _events(history)
    journal = FileJournal(path)
    for event in events:
        journal.append(event)
    journal.close()
    content = path.read_bytes() if path.exists() else b""
    content = content[: cut % (len(content) + 1)]
    path.write_bytes(content)
    kept = content.count(b"\n")

    again = FileJournal(path)
    assert again.position == _events(history[:kept])[1]
    assert again.last_seq == kept
    # All events are appended again, as after a crash between record and journal: none is lost or duplicated.
    assert [again.append(event) for event in events] == [False] * kept + [True] * (len(events) - kept)
    assert [msgspec.json.encode(event) for event in events] == path.read_bytes().splitlines()
    assert _numbers(again.read(0)) == list(range(1, len(events) + 1))
    again.close()
    final = FileJournal(path)
    assert final.position == _events(history)[1]
    final.close()


def test_a_pools_journal_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "pool.events.jsonl"
    journal = PoolJournal(path)
    assert journal.pool == ""
    journal.append(PoolStarted(time=1.0, pool="p", term=2, seq=1, url="u", pid=1, policy="fair", reserve=0))
    journal.close()
    again = PoolJournal(path)
    assert (again.pool, again.term, again.last_seq) == ("p", 2, 1)
    again.close()


def test_a_nan_loss_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = FileJournal(path)
    journal.append(made("step_committed", seq=1, step=1, loss=math.nan, samples=4))
    journal.close()
    again = FileJournal(path)
    assert math.isnan(again.position.loss)
    assert (again.position.step, again.position.samples) == (1, 4)
    again.close()


# ---- power cuts, and truncated files ----


class Disk:
    """Simulates a disk that keeps only the data that was synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[str, int] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, file: int) -> None:
        self._fsync(file)
        self.synced[os.readlink(f"/proc/self/fd/{file}")] = os.fstat(file).st_size


def test_synced_events_and_the_directory_entry_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "events.jsonl"
    journal = FileJournal(path)
    journal.sync()
    assert disk.synced == {}
    journal.append(Event(seq=1))
    assert str(tmp_path) in disk.synced
    assert str(path) not in disk.synced
    for seq in range(2, 5):
        journal.append(Event(seq=seq))
        journal.sync()
        assert disk.synced[str(path)] == path.stat().st_size
    del disk.synced[str(path)]
    journal.sync()
    assert str(path) not in disk.synced, "without a new event, nothing must be synced"
    journal.append(Event(seq=5))
    journal.close()
    assert disk.synced[str(path)] == path.stat().st_size


@pytest.mark.parametrize(
    "tail",
    [
        b"\0" * 64,
        b'{"event":"some',
        b'{"event":"something","se' + b"\0" * 40,
        b'{"event":"something","se\0\0\0\0":1}\n',
        b"\0" * 4096 + b'{"event":"something","time":0,"seq":9}\n',
        b"\0" * 100 + b"\n",
    ],
)
@pytest.mark.parametrize("whole", [0, 3])
def test_a_damaged_end_is_truncated_at_the_next_append(tmp_path: Path, whole: int, tail: bytes) -> None:
    path = tmp_path / "events.jsonl"
    lines = b"".join(msgspec.json.encode(Event(seq=seq)) + b"\n" for seq in range(1, whole + 1))
    path.write_bytes(lines + tail)
    journal = FileJournal(path)
    assert (journal.last_seq, journal.damaged) == (whole, len(tail))
    assert _numbers(journal.read(0)) == list(range(1, whole + 1))
    assert path.read_bytes() == lines + tail
    journal.append(Event(seq=whole + 1))
    journal.close()
    assert path.read_bytes() == lines + msgspec.json.encode(Event(seq=whole + 1)) + b"\n"


def _repaired(from_seq: int, to_seq: int, to_step: int) -> JournalRepaired:
    return JournalRepaired(
        time=9.0,
        job="j",
        term=1,
        generation=1,
        seq=to_seq,
        from_seq=from_seq,
        to_seq=to_seq,
        from_step=0,
        to_step=to_step,
        samples=to_step * 4,
        step_samples=4,
        loss=math.nan,
        step_time=8.0,
    )


@pytest.mark.parametrize("before", [0, 1, 255, 256, 600])
def test_one_repair_event_replaces_a_range_of_lost_events(tmp_path: Path, before: int) -> None:
    path, lost = tmp_path / "events.jsonl", 1000
    journal = FileJournal(path, recent=10)
    for seq in range(1, before + 1):
        journal.append(Event(seq=seq))
    with pytest.raises(JournalError, match="missing"):
        journal.append(_repaired(before + 2, before + lost, 7))
    assert journal.append(_repaired(before + 1, before + lost, 7))
    for seq in range(before + lost + 1, before + lost + 301):
        journal.append(Event(seq=seq))
    there = [*range(1, before + 1), *range(before + lost, before + lost + 301)]
    again = FileJournal(path, recent=10)
    assert again.position.samples == 28
    assert again.position.step == 7
    assert again.position.seq == again.last_seq == before + lost + 300
    for opened, after, limit in itertools.product((journal, again), (0, before, before + 500, there[-12]), (1, 1000)):
        assert _numbers(opened.read(after, limit)) == [seq for seq in there if seq > after][:limit]
    journal.close()
    again.close()


def test_a_replaced_writer_can_no_longer_append(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    old = FileJournal(path)
    old.append(Event(seq=1))
    new = FileJournal(path)
    new.append(Event(seq=2, time=7.0))
    before = path.read_bytes()
    with pytest.raises(JournalTakenError, match="another one writes to it"):
        old.append(Event(seq=2))
    assert path.read_bytes() == before
    assert old.last_seq == 1
    new.append(Event(seq=3))
    assert _numbers(path.read_bytes().splitlines()) == [1, 2, 3]
    old.close()
    new.close()


def test_a_writer_that_opened_before_another_append_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    old = FileJournal(path)
    new = FileJournal(path)
    old.append(Event(seq=1))
    with pytest.raises(JournalTakenError):
        new.append(Event(seq=1, time=3.0))
    assert len(path.read_bytes().splitlines()) == 1
    old.close()
    new.close()


@pytest.mark.parametrize(
    "content",
    [
        b"notes",
        b"notes\n",
        b'{"event":"something","time":0,"seq":2}\n',
        b'{"event":"something","time":0,"seq":1}\n{"event":"something","time":0,"seq":3}\n',
        b'{"event":"something","time":0,"seq":1}\nnotes\n',
        b'{"event":"something","time":0,"seq":1}\nnotes',
        b"\xff\x00\n",
        b'{"event":"\xb5","seq":1}\n',
        b'{"event":' + b"[" * 100_000 + b"\n",
    ],
)
def test_a_file_that_is_not_a_journal_is_refused_and_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match="holds something else"):
        FileJournal(path)
    assert path.read_bytes() == content


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="is not a file"):
        FileJournal(tmp_path)
    with pytest.raises(BadInputError, match="no directory"):
        FileJournal(tmp_path / "missing" / "events.jsonl")


_FULL = """
import resource, signal, sys
from pathlib import Path
import msgspec
from holdfast.observability.journal_file import FileJournal

class Event(msgspec.Struct, tag_field="event", tag="something"):
    seq: int
    time: float = 0.0

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
path, goes_on = Path(sys.argv[1]), sys.argv[2] == "goes on"
journal, lost = FileJournal(path, recent=8), []
journal.on_lost = lambda file, why: lost.append((file, why))
for seq in range(1, 100):
    journal.append(Event(seq))
    journal.sync()
assert len(lost) == 1 and lost[0][0] == str(path), lost
read = [msgspec.json.decode(line)["seq"] for line in journal.read(0)]
assert read == list(range(1, 100)), read
assert [msgspec.json.decode(line)["seq"] for line in journal.read(50, 10)] == list(range(51, 61))
whole = path.read_bytes()
assert whole.endswith(b"}\\n") and len(whole) <= 1000
if goes_on:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.append(Event(100))
    assert [msgspec.json.decode(line)["seq"] for line in journal.read(0)] == list(range(1, 101))
journal.close()
"""


@pytest.mark.parametrize(("way", "last"), [("stays", None), ("goes on", 100)])
def test_a_full_disk_is_reported_once_and_events_are_kept_in_memory(tmp_path: Path, way: str, last: int | None) -> None:
    """A full disk must not end the job."""
    path = tmp_path / "events.jsonl"
    subprocess.run([sys.executable, "-c", _FULL, path, way], timeout=60, check=True)
    again = FileJournal(path)
    assert _numbers(path.read_bytes().splitlines()) == list(range(1, again.last_seq + 1))
    assert last is None or again.last_seq == last
    again.close()


def test_a_file_with_too_many_pending_events_ends_without_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, recent = tmp_path / "events.jsonl", 8
    journal = FileJournal(path, recent=recent)
    journal.append(Event(seq=1))
    monkeypatch.setattr(journal_file, "MAX_PENDING_BYTES", 1000)
    monkeypatch.setattr(os, "write", _no_space)
    for seq in range(2, 50):
        journal.append(Event(seq=seq))
    monkeypatch.undo()
    journal.append(Event(seq=50))
    assert _numbers(journal.read(0)) == [1, *range(51 - recent, 51)], "memory must hold the newest events"
    assert _numbers(path.read_bytes().splitlines()) == [1]
    journal.close()
    again = FileJournal(path)
    assert again.last_seq == 1
    again.append(Event(seq=2))
    again.close()


def test_a_writer_replaced_while_its_disk_is_full_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    old = FileJournal(path)
    old.append(Event(seq=1))
    with monkeypatch.context() as full:
        full.setattr(os, "write", _no_space)
        old.append(Event(seq=2))
    new = FileJournal(path)
    new.append(Event(seq=2))
    new.close()
    with pytest.raises(JournalTakenError):
        old.append(Event(seq=3))
    old.close()
    assert _numbers(path.read_bytes().splitlines()) == [1, 2]


def _no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
