"""A node's parts of snapshots: the folder to which its workers write, the server for readers, and fetched parts.

`holdfast.coordination.agent.held_snapshots` and the coordinator decide which parts are kept, fetched and dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.control.agent.settings import AgentSettings
from holdfast.control.agent.snapshots.fetching import SnapshotFetcher
from holdfast.control.agent.snapshots.part_server import SnapshotServer
from holdfast.control.link.snapshots.files import find_parts, make_folder, part_path, remove_abandoned
from holdfast.control.owned_folders import lock_folder, remove_abandoned_folders
from holdfast.protocol.messages.agent import NodeSnapshots, WantedPart
from holdfast.protocol.state import SnapshotPart

_log = logging.getLogger("holdfast.agent")

SHARED_MEMORY = "/dev/shm"
#: Parts of an agent that was killed stay this many seconds for the next agent of its name.
LEFT_S = 24 * 3600.0

#: tries to lock a folder that another process may be removing, and seconds between them
_LOCK_TRIES, _LOCK_PAUSE_S = 10, 0.05

_HEAD = "holdfast-"
#: at the end of the name of a folder that no later agent takes over: its agent's launcher is gone with it
_OF_RUN = ".run"


def snapshot_folder(settings: AgentSettings, *, always: bool = False) -> str:
    """Return the folder for a node's parts of snapshots, the same for a restarted agent, or "" without one.

    Args:
        always: also if the job takes no regular snapshots.
    """
    spec = settings.spec
    if not (spec.checkpoint.snapshot_every or always):
        return ""
    origin = zlib.crc32(f"{settings.coordinator} {settings.digest}".encode())
    base = spec.checkpoint.snapshot_dir or SHARED_MEMORY
    kind = _OF_RUN if settings.of_run else ""
    return f"{base}/{_HEAD}{os.getuid()}-{spec.name}-{settings.node}-{origin:08x}{kind}"


def find_abandoned_snapshots(snapshot_dir: str) -> str:
    """Return the pattern of the folders, in a job's `snapshot_dir`, that are of no use once their lock is free."""
    return f"{glob.escape(snapshot_dir or SHARED_MEMORY)}/{_HEAD}{os.getuid()}-*{_OF_RUN}"


def remove_snapshots(settings: AgentSettings) -> None:
    """Remove a node's parts of snapshots after the end of the job and of its agent."""
    shutil.rmtree(snapshot_folder(settings, always=True), ignore_errors=True)


class SnapshotKeeper:
    """Holds the parts of one node; for its agent's event loop."""

    def __init__(self, settings: AgentSettings, on_part: Callable[[SnapshotPart], None]) -> None:
        """Hold nothing yet.

        Args:
            on_part: called in the event loop once a copy of another node's part is complete.
        """
        self._host, self._job = settings.advertise, settings.spec.name
        self._usual = bool(settings.spec.checkpoint.snapshot_every)
        self._folder = Path(snapshot_folder(settings, always=True))
        self._on_part = on_part
        self._key = b""
        #: the folder, held as long as this agent lives; -1: not yet
        self._lock = -1
        self._door: SnapshotServer | None = None
        self._fetching: SnapshotFetcher | None = None

    def open(self, *, always: bool = False) -> NodeSnapshots | None:
        """Create and lock the folder, and serve its parts. Return the address for readers, with the parts of an earlier
        agent.

        Folders that other agents have abandoned are removed. Return None if the job takes no regular snapshots, or,
        with a warning, if the folder or a port cannot be used.

        Args:
            always: also if the job takes no regular snapshots.
        """
        folder, loop = self._folder, asyncio.get_running_loop()
        if not (self._usual or always):
            return None
        try:
            self._lock = _make_and_lock(folder)
            _remove_left_folders(str(folder.parent))
            parts = find_parts(folder, self._job, _log_removed)
            door = SnapshotServer(self._host, folder, self._job, lambda: self._key)
            port = door.start()
        except OSError as error:
            _log.warning("no snapshots are kept on this node: %s", error)
            return None
        self._door = door
        tell = self._on_part
        self._fetching = SnapshotFetcher(
            folder, self._job, lambda: self._key, lambda part: _call_in_loop(loop, lambda: tell(part))
        )
        return NodeSnapshots(host=self._host, port=port, parts=tuple(parts))

    def admit(self, key: bytes) -> None:
        """Set the secret that readers must know. Before the first call, no reader is admitted."""
        self._key = key

    def fetch(self, wanted: Sequence[WantedPart]) -> None:
        """Fetch these parts of other nodes, instead of those of the last call. Ignored if `open` returned None."""
        if self._fetching is not None:
            self._fetching.set_wanted(wanted)

    def forget(self, parts: Sequence[SnapshotPart], why: str = "") -> None:
        """Remove these parts, and unfinished files of ended processes.

        Args:
            why: the reason, for a warning; "" if newer parts replace these.
        """
        if why:
            _log.warning("%s of snapshots dropped: %s", f"{len(parts)} part{'s' * (len(parts) > 1)}", why)
        for part in parts:
            part_path(self._folder, part).unlink(missing_ok=True)
        remove_abandoned(self._folder)

    async def close(self, *, remove: bool) -> None:
        """Stop fetching and serving, and unlock the folder.

        Args:
            remove: whether to remove the folder, too, because the job has ended here. A folder that this agent could
                not lock stays.
        """
        if self._fetching is not None:
            await asyncio.to_thread(self._fetching.close)
            self._fetching = None
        if self._door is not None:
            await asyncio.to_thread(self._door.close)
            self._door = None
        if self._lock >= 0:  # Else the folder belongs to another agent.
            if remove:
                shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _log_removed(path: Path, why: str) -> None:
    _log.warning("%s is removed, because it is not part of a snapshot of this job: %s", path, why)


def _make_and_lock(folder: Path) -> int:
    """Make a folder if it does not exist, and lock it for this agent. Return the descriptor that holds the lock.

    Another process that removes abandoned folders may lock and remove it at any time before this one has locked it. So
    this is tried several times.

    Raises:
        OSError: another agent has locked it, or it cannot be made.
    """
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(FileNotFoundError, FileExistsError, BlockingIOError):
            make_folder(folder)
            return lock_folder(str(folder))
        time.sleep(_LOCK_PAUSE_S)
    raise OSError(f"{folder} is not a folder, or another agent of this name uses it")


def _remove_left_folders(base: str) -> None:
    """Remove the folders of killed agents in `base`: those of launched jobs at once, others after `LEFT_S` seconds."""
    remove_abandoned_folders(find_abandoned_snapshots(base))
    remove_abandoned_folders(f"{glob.escape(base)}/{_HEAD}{os.getuid()}-*", older_s=LEFT_S)


def _call_in_loop(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the agent has ended
        loop.call_soon_threadsafe(action)
