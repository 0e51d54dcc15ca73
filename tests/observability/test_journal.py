"""The journal: order, bounds, followers; on disk: torn ends, fences, sums."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import BadInputError
from holdfast.observability.journal import Journal, JournalError, JournalFacts, JournalTakenError
from holdfast.observability.journal_file import FileJournal


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="something"):
    seq: int
    time: float = 0.0
    epoch: int = 0


class Committed(Event, frozen=True, kw_only=True, tag_field="event", tag="step_committed"):
    step: int
    loss: float
    samples: int


class Started(Event, frozen=True, kw_only=True, tag_field="event", tag="epoch_started"):
    pass


class RolledBack(Event, frozen=True, kw_only=True, tag_field="event", tag="rolled_back"):
    to_step: int


def _numbers(lines: list[bytes]) -> list[int]:
    return [json.loads(line)["seq"] for line in lines]


Make = Callable[[], Journal]


@pytest.fixture(params=["memory", "file"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    return Journal() if request.param == "memory" else FileJournal(tmp_path / "events.jsonl")


def test_events_come_back_in_order(journal: Journal) -> None:
    for seq in range(1, 6):
        assert journal.append(Event(seq=seq, time=seq / 2))
    assert journal.last_seq == 5
    assert _numbers(journal.read(0)) == [1, 2, 3, 4, 5]
    assert _numbers(journal.read(3)) == [4, 5]
    assert journal.read(5) == []
    assert journal.read(99) == []
    assert _numbers(journal.read(1, limit=2)) == [2, 3]
    assert json.loads(journal.read(4)[0]) == {"event": "something", "seq": 5, "time": 2.5, "epoch": 0}
    journal.close()


def test_what_is_there_is_skipped_and_a_gap_refused(journal: Journal) -> None:
    journal.append(Event(seq=1))
    journal.append(Event(seq=2))
    assert not journal.append(Event(seq=1))
    assert not journal.append(Event(seq=2, time=9.0))
    with pytest.raises(JournalError, match="event 4 cannot follow event 2"):
        journal.append(Event(seq=4))
    assert _numbers(journal.read(0)) == [1, 2]
    journal.close()


def test_nothing_comes_after_the_end(journal: Journal) -> None:
    journal.append(Event(seq=1))
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.append(Event(seq=2))
    assert _numbers(journal.read(0)) == [1]


def test_memory_is_bounded_and_the_file_remembers(tmp_path: Path) -> None:
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


def test_a_follower_is_woken_by_an_event_and_by_the_end(journal: Journal) -> None:
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


def test_waiting_ends_with_the_time(journal: Journal) -> None:
    asyncio.run(asyncio.wait_for(journal.wait_beyond(0, 0.01), 60.0))
    assert journal.last_seq == 0
    journal.close()


# ---- on disk ----


def test_every_event_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = FileJournal(path)
    for seq in range(1, 4):
        journal.append(Event(seq=seq))
        assert len(path.read_bytes().splitlines()) == seq
    journal.close()


def test_opening_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    FileJournal(path).close()
    assert not path.exists()
    path.write_bytes(b'{"event":"something","seq":1}\n{"event":"some')
    FileJournal(path).close()
    assert path.read_bytes() == b'{"event":"something","seq":1}\n{"event":"some'


_history = st.lists(st.sampled_from(["step", "other", "epoch", "back"]), max_size=30)


def _events(history: list[str]) -> tuple[list[Event], JournalFacts]:
    """Return events made after a history, and what is true after them, told independently."""
    events: list[Event] = []
    applied: list[Committed] = []
    epoch = 0
    for seq, kind in enumerate(history, 1):
        if kind == "step":
            event = Committed(seq=seq, time=seq * 1.5, step=len(applied) + 1, loss=1 / seq, samples=seq)
            applied.append(event)
        elif kind == "epoch":
            epoch += 1
            event = Started(seq=seq, epoch=epoch)
        elif kind == "back":
            event = RolledBack(seq=seq, to_step=len(applied) // 2)
            applied = applied[: len(applied) // 2]
        else:
            event = Event(seq=seq)
        events.append(event)
    last = applied[-1] if applied else Committed(seq=0, step=0, loss=0.0, samples=0)
    samples = sum(event.samples for event in applied)
    return events, JournalFacts(
        seq=len(events), step=last.step, step_time=last.time, loss=last.loss, samples=samples, epoch_announced=epoch
    )


@given(history=_history, cut=st.integers(min_value=0, max_value=10_000))
@settings(max_examples=150, deadline=None)
def test_a_file_cut_anywhere_goes_on_where_it_ends(
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
    assert again.facts == _events(history[:kept])[1]
    assert again.last_seq == kept
    # All events are said again, as after a crash between record and journal: none is missing, none double.
    assert [again.append(event) for event in events] == [False] * kept + [True] * (len(events) - kept)
    assert [msgspec.json.encode(event) for event in events] == path.read_bytes().splitlines()
    assert _numbers(again.read(0)) == list(range(1, len(events) + 1))
    again.close()
    final = FileJournal(path)
    assert final.facts == _events(history)[1]
    final.close()


def test_a_loss_that_is_no_number_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = FileJournal(path)
    journal.append(Committed(seq=1, step=1, loss=math.nan, samples=4))
    journal.close()
    again = FileJournal(path)
    assert math.isnan(again.facts.loss)
    assert (again.facts.step, again.facts.samples) == (1, 4)
    again.close()


def test_who_was_replaced_writes_nothing_more(tmp_path: Path) -> None:
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


def test_who_read_before_the_other_wrote_writes_nothing(tmp_path: Path) -> None:
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
        b'{"event":"something","seq":2}\n',
        b'{"event":"something","seq":1}\n{"event":"something","seq":3}\n',
        b'{"event":"something","seq":1}\nnotes\n',
        b'{"event":"something","seq":1}\nnotes',
        b"\xff\x00\n",
        b'{"event":"\xb5","seq":1}\n',
        b'{"event":' + b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_no_journal_is_refused_and_untouched(tmp_path: Path, content: bytes) -> None:
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
from holdfast.observability.journal import JournalError
from holdfast.observability.journal_file import FileJournal

class Event(msgspec.Struct, tag_field="event", tag="something"):
    seq: int

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
journal = FileJournal(Path(sys.argv[1]))
try:
    for seq in range(1, 100):
        journal.append(Event(seq))
except JournalError as error:
    print(journal.last_seq, error)
"""


def test_a_full_disk_is_an_error_and_tears_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    out = subprocess.run([sys.executable, "-c", _FULL, path], capture_output=True, text=True, timeout=60, check=True)
    last, _, error = out.stdout.partition(" ")
    assert "cannot be written" in error
    assert path.read_bytes().endswith(b"}\n")
    assert _numbers(path.read_bytes().splitlines()) == list(range(1, int(last) + 1))
    again = FileJournal(path)
    assert again.last_seq == int(last)
    again.close()
