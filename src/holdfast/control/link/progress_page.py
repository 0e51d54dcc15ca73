"""The page of progress: memory that an agent shares with its workers, in which each keeps where it stands.

The worker stores at every boundary and asks nobody; the agent looks when it likes, at a stopped process too. The
memory has no name (memfd): a worker opens it through its agent's descriptor in /proc, so that none is left behind, and
no /dev/shm is needed. Each worker has a slot, by its index on the node:

    offset  what
         0  head: number of the store, generation, step, since, pid, world, micro-batch (-1: none), activity, the number
        56  look: when the training thread last looked whether the collective that it waits in has ended, or found that
            it had; since when it waits (0: it does not)
        72  totals: by activity, how many have ended, their seconds, the longest
       456  waits: the newest four in collectives, each number, group's size, name, bytes, begin, end (0: not over)
       648  reason: why the script has paused, UTF-8
       712  link: how fast its data goes out to its peers, in bytes per second; 0: not known
       720  moved: how much state it has sent and received, in bytes
       736  garbage collections of the whole heap: their seconds, and since when one is under way (0: none is)

Times are of CLOCK_MONOTONIC, which all processes of a machine share. A store that is under way, or anything that makes
no sense, reads as nothing. What is stored alone is stored at once, eight bytes (`struct` writes zeros first: whoever
looked in that moment, or at a process that lost its core in it, would read that it has not looked for ages).
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import struct
import threading
import time
from typing import Protocol

from holdfast.control.link.stacks import answer_with_stacks
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.coordination.timing.reading import CollectiveWait, ProgressAccount, Reading, Total
from holdfast.protocol.messages.progress import ACTIVITIES, Activity

_log = logging.getLogger(__name__)

SLOT_BYTES = 1024
#: thirty years; what says more makes no sense
_MAX_UPTIME_S = 1e9
#: far more than any link has, in bytes per second
_MAX_RATE = 1e15
#: and than any process ever moves, in bytes
_MAX_MOVED = 1 << 60
_WAITS = 4
_REASON_BYTES = 64

_HEAD = struct.Struct("=QQQdIIiIQ")
_LOOK = struct.Struct("=dd")
_TOTAL = struct.Struct("=Qdd")
_TIME = struct.Struct("=d")
_WAIT = struct.Struct("=II16sQdd")
_LOOK_AT = _HEAD.size
_TOTALS_AT = _LOOK_AT + _LOOK.size
_WAITS_AT = _TOTALS_AT + len(ACTIVITIES) * _TOTAL.size
_REASON_AT = _WAITS_AT + _WAITS * _WAIT.size
_LINK_AT = _REASON_AT + _REASON_BYTES
_MOVED = struct.Struct("=QQ")
_MOVED_AT = _LINK_AT + _TIME.size
_COLLECTED = struct.Struct("=dd")
_COLLECTED_AT = _MOVED_AT + _MOVED.size
#: A garbage collection that takes longer counts as a hang (a finalizer may be stuck).
_MAX_COLLECTION_S = 30.0
_ENDED_AT = _WAIT.size - _TIME.size
#: in a slot's eight bytes each
_LOOKED, _WAITS_SINCE = _LOOK_AT // 8, _LOOK_AT // 8 + 1


class ProgressSlot(Protocol):
    """Where a training thread says what it is about. For that thread alone."""

    def place(self, generation: int, step: int, world: int) -> None:
        """Everything from now on is of this generation, and of this step."""
        ...

    def at(self, activity: Activity, micro_batch: int = -1) -> None:
        """An activity begins, the one before has ended."""
        ...

    def pause(self, reason: str) -> None:
        """The script is busy with something of its own; the end of that is whatever begins next."""
        ...

    def wait(self, what: str, size: int, nbytes: int) -> None:
        """A wait in a collective begins."""
        ...

    def look(self) -> None:
        """It lasts."""
        ...

    def go_on(self) -> None:
        """It has ended."""
        ...

    def link(self, bytes_per_s: float) -> None:
        """Data goes out to peers so fast."""
        ...

    def moved(self, sent: int, received: int) -> None:
        """So many bytes of state were sent, and received. Any thread."""
        ...

    @property
    def now(self) -> tuple[Activity, int]:
        """What has begun last, and with which micro-batch (-1: none)."""
        ...


class NoProgress:
    """Nobody looks."""

    now = (Activity.STARTING, -1)

    def place(self, generation: int, step: int, world: int) -> None:
        """Keep nothing."""

    def at(self, activity: Activity, micro_batch: int = -1) -> None:
        """Keep nothing."""

    def pause(self, reason: str) -> None:
        """Keep nothing."""

    def wait(self, what: str, size: int, nbytes: int) -> None:
        """Keep nothing."""

    def look(self) -> None:
        """Keep nothing."""

    def go_on(self) -> None:
        """Keep nothing."""

    def link(self, bytes_per_s: float) -> None:
        """Keep nothing."""

    def moved(self, sent: int, received: int) -> None:
        """Keep nothing."""


class ProgressWriter:
    """A worker's own slot."""

    def __init__(self, path: str, index: int) -> None:
        """Open the page of an agent.

        Raises:
            OSError: there is none.
        """
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._page = mmap.mmap(opened, os.fstat(opened).st_size)
        finally:
            os.close(opened)
        if (index + 1) * SLOT_BYTES > len(self._page):
            raise OSError(f"{path} has no room for worker {index}")
        self._at = index * SLOT_BYTES
        #: a slot's eight bytes each, as times and as numbers
        slot = memoryview(self._page)[self._at : self._at + SLOT_BYTES]
        self._times, self._numbers = slot.cast("d"), slot.cast("Q")
        self._pid = os.getpid()
        self._number = self._waited = 0
        self._moving = threading.Lock()
        self._sent = self._received = 0
        self.moved(0, 0)  # (a process that had this slot before may have moved some)
        self._collected_s = self._collects_since = 0.0
        self._set_collected(0.0)
        self._since = time.monotonic()
        self._generation = self._step = self._world = 0
        self._counts = [0] * len(ACTIVITIES)
        self._sums = [0.0] * len(ACTIVITIES)
        self._longest = [0.0] * len(ACTIVITIES)
        self._activity, self._micro_batch = Activity.STARTING, -1
        self.at(Activity.STARTING)

    @property
    def now(self) -> tuple[Activity, int]:
        """What has begun last, and with which micro-batch (-1: none)."""
        return self._activity, self._micro_batch

    def place(self, generation: int, step: int, world: int) -> None:
        """Everything from now on is of this generation, and of this step; said with what begins next."""
        self._generation, self._step, self._world = generation, step, world

    def at(self, activity: Activity, micro_batch: int = -1) -> None:
        """An activity begins, the one before has ended."""
        code, now, page, at = self._activity, time.monotonic(), self._page, self._at
        took = now - self._since
        count = self._counts[code] = self._counts[code] + 1
        total = self._sums[code] = self._sums[code] + took
        if took > self._longest[code]:
            self._longest[code] = took
        place = (_TOTALS_AT + code * _TOTAL.size) // 8
        self._times[place + 1], self._times[place + 2], self._numbers[place] = total, self._longest[code], count
        self._activity, self._micro_batch, self._since = activity, micro_batch, now
        number = self._number = self._number + 1
        _HEAD.pack_into(
            page,
            at,
            number,
            self._generation,
            self._step,
            now,
            self._pid,
            self._world,
            micro_batch,
            activity,
            number,
        )

    def pause(self, reason: str) -> None:
        """The script is busy with something of its own; the end of that is whatever begins next."""
        text = reason.encode()[:_REASON_BYTES]
        begin = self._at + _REASON_AT
        self._page[begin : begin + _REASON_BYTES] = text.ljust(_REASON_BYTES, b"\0")
        self.at(Activity.PAUSED)

    def wait(self, what: str, size: int, nbytes: int) -> None:
        """A wait in a collective begins."""
        now = time.monotonic()
        number = self._waited = self._waited + 1
        self._times[_LOOKED], self._times[_WAITS_SINCE] = now, now
        entry = self._at + _WAITS_AT + number % _WAITS * _WAIT.size
        _WAIT.pack_into(self._page, entry, number, size, what.encode()[:16], nbytes, now, 0.0)

    def look(self) -> None:
        """It lasts."""
        self._times[_LOOKED] = time.monotonic()

    def go_on(self) -> None:
        """It has ended."""
        entry = _WAITS_AT + self._waited % _WAITS * _WAIT.size
        now = time.monotonic()
        self._times[(entry + _ENDED_AT) // 8] = now
        self._times[_LOOKED], self._times[_WAITS_SINCE] = now, 0.0

    def link(self, bytes_per_s: float) -> None:
        """Data goes out to peers so fast."""
        self._times[_LINK_AT // 8] = bytes_per_s

    def moved(self, sent: int, received: int) -> None:
        """So many bytes of state were sent, and received. Any thread."""
        with self._moving:
            self._sent, self._received = self._sent + sent, self._received + received
            _MOVED.pack_into(self._page, self._at + _MOVED_AT, self._sent, self._received)

    def on_collection(self, phase: str, info: dict[str, int]) -> None:
        """Store when a collection of the whole heap runs, in which no thread does (`gc.callbacks`)."""
        if info["generation"] < 2:
            return
        now = time.monotonic()
        if phase == "start":
            self._collects_since = now
            self._set_collected(now)
        elif self._collects_since:
            self._collected_s += min(now - self._collects_since, _MAX_COLLECTION_S)
            self._collects_since = 0.0
            self._set_collected(0.0)

    def _set_collected(self, since: float) -> None:
        self._times[_COLLECTED_AT // 8], self._times[_COLLECTED_AT // 8 + 1] = self._collected_s, since


def open_progress(settings: WorkerSettings) -> ProgressSlot:
    """Open a worker's slot of its agent's page, where there is one; nobody is watched who cannot."""
    if not settings.progress:
        return NoProgress()
    try:
        answer_with_stacks(settings.stacks)
        writer = ProgressWriter(settings.progress, settings.local_rank)
        gc.callbacks.append(writer.on_collection)
        return writer
    except OSError as error:
        _log.warning("the agent's page of progress cannot be opened: %s", error)
        return NoProgress()


class AgentMemory:
    """Memory without a name (memfd) that an agent shares with workers: zeros at first."""

    def __init__(self, name: str, size: int) -> None:
        """Make it, for so many bytes.

        Raises:
            OSError: there is no memory for it, or no memfd.
        """
        self.file = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.file, 0, size)  # (a store never meets a page that cannot be had)
        except OSError:
            os.close(self.file)
            raise

    @property
    def path(self) -> str:
        """Where workers open it while this process lives, and has not closed it."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    def close(self) -> None:
        """Let go of it; workers that have opened it keep theirs."""
        os.close(self.file)


class ProgressPage(AgentMemory):
    """An agent's own page: made here, read here."""

    def __init__(self, workers: int) -> None:
        """Make it.

        Raises:
            OSError: there is no memory for it, or no memfd.
        """
        super().__init__("holdfast-progress", size := workers * SLOT_BYTES)
        try:
            self._page = mmap.mmap(self.file, size)
        except OSError:
            os.close(self.file)
            raise

    def close(self) -> None:
        """Let go of it; workers that have opened it keep theirs."""
        self._page.close()
        super().close()

    def read(self, index: int, pid: int) -> Reading | None:
        """Return where the process `pid` stands that fills a worker's place; None where that is not known."""
        slot = self._slot(index, _TOTALS_AT)
        if slot is None:
            return None
        number, generation, step, since, writer, world, micro_batch, code, end = _HEAD.unpack_from(slot)
        looked, waits_since = _LOOK.unpack_from(slot, _LOOK_AT)
        if not number or number != end or writer != pid or code >= len(ACTIVITIES):
            return None
        if not (_is_time(since) and _is_time(looked) and _is_time(waits_since)):
            return None
        return Reading(
            generation=generation,
            step=step,
            activity=Activity(code),
            micro_batch=micro_batch if micro_batch >= 0 else None,
            since=since,
            world=world,
            waits_since=waits_since or None,
            looked=looked,
            collected_s=self._collected_s(index),
        )

    def account(self, index: int, pid: int) -> ProgressAccount | None:
        """Return what is known besides of the process `pid`: totals, and the newest waits."""
        slot = self._slot(index, SLOT_BYTES)
        if slot is None or _HEAD.unpack_from(slot)[4] != pid:
            return None
        rows = _TOTAL.iter_unpack(slot[_TOTALS_AT:_WAITS_AT])
        totals = [Total(count, sum_s, longest_s) for count, sum_s, longest_s in rows]
        reason = slot[_REASON_AT : _REASON_AT + _REASON_BYTES].rstrip(b"\0").decode(errors="replace")
        (link,) = _TIME.unpack_from(slot, _LINK_AT)
        return ProgressAccount(
            totals={one: total for one, total in zip(ACTIVITIES, totals, strict=True) if _sane(total)},
            waits=_waits(slot[_WAITS_AT:_REASON_AT]),
            reason=reason,
            link_bytes_per_s=link if 0.0 <= link < _MAX_RATE else 0.0,
        )

    def moved(self, index: int, pid: int) -> tuple[int, int]:
        """Return how many bytes of state the process `pid` has sent and received; none where that is not known."""
        slot = self._slot(index, SLOT_BYTES)
        if slot is None or _HEAD.unpack_from(slot)[4] != pid:
            return 0, 0
        sent, received = _MOVED.unpack_from(slot, _MOVED_AT)
        return (sent, received) if max(sent, received) < _MAX_MOVED else (0, 0)

    def _collected_s(self, index: int) -> float:
        """Return how long a process has collected garbage in its life, the collection under way included."""
        total_s, since = _COLLECTED.unpack_from(self._page, index * SLOT_BYTES + _COLLECTED_AT)
        if not (_is_time(total_s) and _is_time(since)):
            return 0.0
        return total_s + (min(max(0.0, time.monotonic() - since), _MAX_COLLECTION_S) if since else 0.0)

    def _slot(self, index: int, size: int) -> bytes | None:
        """Return a slot's first bytes, None where they are being written."""
        at = index * SLOT_BYTES
        for _ in range(3):
            one, other = self._page[at : at + size], self._page[at : at + size]
            if one == other:
                return one
        return None


def _waits(data: bytes) -> tuple[CollectiveWait, ...]:
    """Return the waits in a slot, oldest first; what makes no sense is none."""
    found: list[tuple[int, CollectiveWait]] = []
    for number, size, what, nbytes, since, until in _WAIT.iter_unpack(data):
        if number and _is_time(since) and _is_time(until) and (since <= until or not until):
            name = what.rstrip(b"\0").decode(errors="replace")
            found.append((number, CollectiveWait(what=name, size=size, bytes=nbytes, since=since, until=until or None)))
    return tuple(wait for _, wait in sorted(found, key=lambda entry: entry[0]))


def _sane(total: Total) -> bool:
    return total.count > 0 and _is_time(total.sum_s) and _is_time(total.longest_s)


def _is_time(seconds: float) -> bool:
    """Tell whether a machine can have run for so long."""
    return 0.0 <= seconds < _MAX_UPTIME_S
