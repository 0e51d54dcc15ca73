"""The progress page: memory that an agent shares with its workers, in which each worker writes its current activity.

A worker stores at every boundary, without a request. The agent reads at any time, even while the worker is stopped. The
memory has no name (memfd). A worker opens it through its agent's descriptor in /proc, so no file can remain behind, and
/dev/shm is not needed. Each worker has a slot, by its index on the node:

    offset  content
         0  head: number of the store, generation, step, since, pid, world, micro-batch (-1: none), activity, the number
        56  look: time at which the training thread last checked its collective, or found that it had ended; since when
            it waits (0: it does not wait)
        72  totals: for each activity, how many have ended, their seconds, the longest
       456  waits: the newest four in collectives, each number, group's size, name, bytes, begin, end (0: not over)
       648  reason: why the script has paused, UTF-8
       712  link: rate at which it sends data to its peers, in bytes per second; 0: not known
       720  moved: bytes of state that it has sent and received
       736  garbage collections of the whole heap: their seconds, and since when one is running (0: none is)

Times are of CLOCK_MONOTONIC, which all processes of a machine share. A reader ignores an unfinished store, and values
that make no sense. A field that is stored alone is stored as eight bytes at once. `struct` would write zeros first: if
the process lost its core at that moment, a reader would conclude that it has not checked its collective for ages.
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

from holdfast.control.link.stacks import dump_stacks_on_signal
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.coordination.timing.reading import CollectiveWait, ProgressAccount, Reading, Total
from holdfast.protocol.messages.progress import ACTIVITIES, Activity

_log = logging.getLogger(__name__)

SLOT_BYTES = 1024
#: thirty years: longer times make no sense
_MAX_UPTIME_S = 1e9
#: bytes per second, far more than any link has
_MAX_RATE = 1e15
#: bytes, more than any process ever moves
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
#: indices into a slot as words of eight bytes
_LOOKED, _WAITS_SINCE = _LOOK_AT // 8, _LOOK_AT // 8 + 1


class ProgressSlot(Protocol):
    """The slot in which a training thread writes its activity. For that thread only."""

    def set_position(self, generation: int, step: int, world: int) -> None:
        """Set the generation, step and world size of everything from now on."""
        ...

    def start_activity(self, activity: Activity, micro_batch: int = -1) -> None:
        """Start an activity, which ends the previous one."""
        ...

    def start_pause(self, reason: str) -> None:
        """Note that the script does something of its own, until the next activity starts."""
        ...

    def start_wait(self, what: str, size: int, nbytes: int) -> None:
        """Start a wait in a collective."""
        ...

    def renew_wait(self) -> None:
        """Note that the wait still lasts."""
        ...

    def end_wait(self) -> None:
        """End the wait."""
        ...

    def set_link_rate(self, bytes_per_s: float) -> None:
        """Set the rate at which data goes out to peers."""
        ...

    def add_moved_bytes(self, sent: int, received: int) -> None:
        """Add bytes of state that were sent and received. Any thread."""
        ...

    @property
    def current_activity(self) -> tuple[Activity, int]:
        """The current activity, and its micro-batch (-1: none)."""
        ...


class NoProgress:
    """Ignores all progress, because no agent reads it."""

    current_activity = (Activity.STARTING, -1)

    def set_position(self, generation: int, step: int, world: int) -> None:
        """Do nothing."""

    def start_activity(self, activity: Activity, micro_batch: int = -1) -> None:
        """Do nothing."""

    def start_pause(self, reason: str) -> None:
        """Do nothing."""

    def start_wait(self, what: str, size: int, nbytes: int) -> None:
        """Do nothing."""

    def renew_wait(self) -> None:
        """Do nothing."""

    def end_wait(self) -> None:
        """Do nothing."""

    def set_link_rate(self, bytes_per_s: float) -> None:
        """Do nothing."""

    def add_moved_bytes(self, sent: int, received: int) -> None:
        """Do nothing."""


class ProgressWriter:
    """A worker's own slot."""

    def __init__(self, path: str, index: int) -> None:
        """Open the page of an agent.

        Raises:
            OSError: it does not exist, or has no slot for this worker.
        """
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._page = mmap.mmap(opened, os.fstat(opened).st_size)
        finally:
            os.close(opened)
        if (index + 1) * SLOT_BYTES > len(self._page):
            raise OSError(f"{path} has no room for worker {index}")
        self._at = index * SLOT_BYTES
        #: the slot as words of eight bytes, as times and as numbers
        slot = memoryview(self._page)[self._at : self._at + SLOT_BYTES]
        self._times, self._numbers = slot.cast("d"), slot.cast("Q")
        self._pid = os.getpid()
        self._number = self._waited = 0
        self._moving = threading.Lock()
        self._sent = self._received = 0
        self.add_moved_bytes(0, 0)  # clear the totals of a previous process in this slot
        self._collected_s = self._collects_since = 0.0
        self._set_collected(0.0)
        self._since = time.monotonic()
        self._generation = self._step = self._world = 0
        self._counts = [0] * len(ACTIVITIES)
        self._sums = [0.0] * len(ACTIVITIES)
        self._longest = [0.0] * len(ACTIVITIES)
        self._activity, self._micro_batch = Activity.STARTING, -1
        self.start_activity(Activity.STARTING)

    @property
    def current_activity(self) -> tuple[Activity, int]:
        """The current activity, and its micro-batch (-1: none)."""
        return self._activity, self._micro_batch

    def set_position(self, generation: int, step: int, world: int) -> None:
        """Set the generation, step and world size; they are stored with the next activity."""
        self._generation, self._step, self._world = generation, step, world

    def start_activity(self, activity: Activity, micro_batch: int = -1) -> None:
        """Add the time of the previous activity to its totals, and store the new activity with its position and start.

        `micro_batch` is -1 for an activity without one.
        """
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

    def start_pause(self, reason: str) -> None:
        """Start the activity `PAUSED`, and store the reason, at most 64 bytes of it.

        The pause, in which the script does something of its own, lasts until the next activity starts.
        """
        text = reason.encode()[:_REASON_BYTES]
        begin = self._at + _REASON_AT
        self._page[begin : begin + _REASON_BYTES] = text.ljust(_REASON_BYTES, b"\0")
        self.start_activity(Activity.PAUSED)

    def start_wait(self, what: str, size: int, nbytes: int) -> None:
        """Store the start of a wait in a collective, instead of the oldest of four stored waits.

        Args:
            what: name of the collective, of which at most 16 bytes are stored.
            size: number of its members.
            nbytes: bytes that it moves.
        """
        now = time.monotonic()
        number = self._waited = self._waited + 1
        self._times[_LOOKED], self._times[_WAITS_SINCE] = now, now
        entry = self._at + _WAITS_AT + number % _WAITS * _WAIT.size
        _WAIT.pack_into(self._page, entry, number, size, what.encode()[:16], nbytes, now, 0.0)

    def renew_wait(self) -> None:
        """Note that the wait still lasts."""
        self._times[_LOOKED] = time.monotonic()

    def end_wait(self) -> None:
        """Store the end of the last wait, and that the thread no longer waits."""
        entry = _WAITS_AT + self._waited % _WAITS * _WAIT.size
        now = time.monotonic()
        self._times[(entry + _ENDED_AT) // 8] = now
        self._times[_LOOKED], self._times[_WAITS_SINCE] = now, 0.0

    def set_link_rate(self, bytes_per_s: float) -> None:
        """Set the rate at which data goes out to peers."""
        self._times[_LINK_AT // 8] = bytes_per_s

    def add_moved_bytes(self, sent: int, received: int) -> None:
        """Add bytes of state that were sent and received to the totals, and store them. Any thread may call it."""
        with self._moving:
            self._sent, self._received = self._sent + sent, self._received + received
            _MOVED.pack_into(self._page, self._at + _MOVED_AT, self._sent, self._received)

    def on_collection(self, phase: str, info: dict[str, int]) -> None:
        """Store when a garbage collection of the whole heap runs, and the total seconds of all.

        It is for `gc.callbacks`: `phase` is "start" or "stop", and collections of younger generations are ignored. All
        threads stand still meanwhile.
        """
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
    """Open a worker's slot of its agent's page, and store garbage collections and dump stacks on request from now on.

    Without a page, return a `NoProgress`. If the page cannot be opened, log a warning and return one, too.
    """
    if not settings.progress:
        return NoProgress()
    try:
        dump_stacks_on_signal(settings.stacks)
        writer = ProgressWriter(settings.progress, settings.local_rank)
        gc.callbacks.append(writer.on_collection)
        return writer
    except OSError as error:
        _log.warning("the agent's progress page cannot be opened, so hangs of this worker go undetected: %s", error)
        return NoProgress()


class AgentMemory:
    """Memory without a name (memfd), which an agent shares with its workers. It begins as zeros."""

    def __init__(self, name: str, size: int) -> None:
        """Allocate `size` bytes.

        Raises:
            OSError: there is not enough memory, or the system has no memfd.
        """
        self.file = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            # Allocate now: otherwise a later store to a page could fail with SIGBUS.
            os.posix_fallocate(self.file, 0, size)
        except OSError:
            os.close(self.file)
            raise

    @property
    def path(self) -> str:
        """The path at which workers open it, while this process lives and has not closed it."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    def close(self) -> None:
        """Close it. Workers that have opened it keep theirs."""
        os.close(self.file)


class ProgressPage(AgentMemory):
    """An agent's own page, which it creates and reads."""

    def __init__(self, workers: int) -> None:
        """Create it.

        Raises:
            OSError: there is not enough memory, or the system has no memfd.
        """
        super().__init__("holdfast-progress", size := workers * SLOT_BYTES)
        try:
            self._page = mmap.mmap(self.file, size)
        except OSError:
            os.close(self.file)
            raise

    def close(self) -> None:
        """Close it. Workers that have opened it keep theirs."""
        self._page.close()
        super().close()

    def read(self, index: int, pid: int) -> Reading | None:
        """Return the current activity of the process `pid` in slot `index`.

        Return None if the slot is being written, is empty, belongs to another process, or has values that make no
        sense.
        """
        slot = self._read_slot(index, _TOTALS_AT)
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

    def read_account(self, index: int, pid: int) -> ProgressAccount | None:
        """Return the totals, the newest waits, the pause reason and the link rate of the process `pid` in a slot.

        Values that make no sense are left out, and a rate then is 0. Return None if the slot is being written or
        belongs to another process.
        """
        slot = self._read_slot(index, SLOT_BYTES)
        if slot is None or _HEAD.unpack_from(slot)[4] != pid:
            return None
        rows = _TOTAL.iter_unpack(slot[_TOTALS_AT:_WAITS_AT])
        totals = [Total(count, sum_s, longest_s) for count, sum_s, longest_s in rows]
        reason = slot[_REASON_AT : _REASON_AT + _REASON_BYTES].rstrip(b"\0").decode(errors="replace")
        (link,) = _TIME.unpack_from(slot, _LINK_AT)
        return ProgressAccount(
            totals={kind: total for kind, total in zip(ACTIVITIES, totals, strict=True) if _is_plausible(total)},
            waits=_decode_waits(slot[_WAITS_AT:_REASON_AT]),
            reason=reason,
            link_bytes_per_s=link if 0.0 <= link < _MAX_RATE else 0.0,
        )

    def read_moved_bytes(self, index: int, pid: int) -> tuple[int, int]:
        """Return the bytes of state that the process `pid` has sent and received.

        Return zeros if the slot is being written, belongs to another process, or has values that make no sense.
        """
        slot = self._read_slot(index, SLOT_BYTES)
        if slot is None or _HEAD.unpack_from(slot)[4] != pid:
            return 0, 0
        sent, received = _MOVED.unpack_from(slot, _MOVED_AT)
        return (sent, received) if max(sent, received) < _MAX_MOVED else (0, 0)

    def _collected_s(self, index: int) -> float:
        """Return the seconds that a process has collected garbage so far.

        A running collection counts with at most 30 s. Return 0 for values that make no sense.
        """
        total_s, since = _COLLECTED.unpack_from(self._page, index * SLOT_BYTES + _COLLECTED_AT)
        if not (_is_time(total_s) and _is_time(since)):
            return 0.0
        return total_s + (min(max(0.0, time.monotonic() - since), _MAX_COLLECTION_S) if since else 0.0)

    def _read_slot(self, index: int, size: int) -> bytes | None:
        """Return the first `size` bytes of a slot, or None if they change while they are read, three times in a row."""
        at = index * SLOT_BYTES
        for _ in range(3):
            first, second = self._page[at : at + size], self._page[at : at + size]
            if first == second:
                return first
        return None


def _decode_waits(data: bytes) -> tuple[CollectiveWait, ...]:
    """Return the waits in a slot, oldest first. Entries that make no sense are left out."""
    found: list[tuple[int, CollectiveWait]] = []
    for number, size, what, nbytes, since, until in _WAIT.iter_unpack(data):
        if number and _is_time(since) and _is_time(until) and (since <= until or not until):
            name = what.rstrip(b"\0").decode(errors="replace")
            found.append((number, CollectiveWait(what=name, size=size, bytes=nbytes, since=since, until=until or None)))
    return tuple(wait for _, wait in sorted(found, key=lambda entry: entry[0]))


def _is_plausible(total: Total) -> bool:
    return total.count > 0 and _is_time(total.sum_s) and _is_time(total.longest_s)


def _is_time(seconds: float) -> bool:
    """Return whether a machine can have run for this many seconds."""
    return 0.0 <= seconds < _MAX_UPTIME_S
