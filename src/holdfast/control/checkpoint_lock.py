"""The advisory lock of a checkpoint directory: two jobs that write to one directory would remove each other's files.

The lock is a file that its owner renews every few seconds. A job that finds the lock of another job watches the file:
if it changes, the other job runs, and this one is refused. If not, the lock is stale and is replaced. Clocks do not
matter.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.errors import BadInputError
from holdfast.protocol.names import MALFORMED
from holdfast.storage import Storage, error_text, storage_at

LOCK_NAME = "holdfast.lock"
_MAX_BYTES = 16_384
#: times that a lock may exist and then not be found, because another job has just removed it
_MAX_VANISHED = 20

Text = Annotated[str, Meta(max_length=4096)]


class LockOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the lock file."""

    #: the job's name, for messages
    job: Text
    #: random, and the same after a restart or a fail-over of the job: tells jobs of one name apart
    identity: Text
    host: Text = ""
    pid: int = 0
    #: the job's events file, "" if it has none
    events: Text = ""
    #: counts the renewals, so that each one changes the file
    renewals: int = 0

    def __str__(self) -> str:
        where = f" (process {self.pid} on {self.host})" if self.pid else ""
        return f"job {self.job!r}{where}"


def lock_owner(job: str, identity: str, events: str = "") -> LockOwner:
    """Return this process as the owner of a lock."""
    path = os.path.realpath(events) if events else ""
    return LockOwner(job=job, identity=identity, host=socket.gethostname(), pid=os.getpid(), events=path)


class CheckpointLock:
    """One directory's lock, from `acquire` to `release`.

    Args:
        directory: a path or a URL.
        say: prints one line for the user.
        renew_s: seconds between two renewals; by default 1, or 5 on remote storage.
        watch_s: for how many seconds another job's file is watched; by default 5, or 20 on remote storage.
    """

    def __init__(
        self,
        directory: str,
        owner: LockOwner,
        say: Callable[[str], None],
        *,
        renew_s: float | None = None,
        watch_s: float | None = None,
    ) -> None:
        self._storage: Storage = storage_at(directory)
        self._owner = owner
        self._say = say
        self._renew_s = renew_s or (1.0 if self._storage.local else 5.0)
        self._watch_s = watch_s or (5.0 if self._storage.local else 20.0)
        self._released = threading.Event()
        self._renewer: threading.Thread | None = None

    def acquire(self) -> LockOwner | None:
        """Take the lock, and renew it in a thread until `release`.

        A lock of the same identity, left before a restart, is overwritten. Another job's lock is watched for `watch_s`
        seconds, and replaced if it is stale. Warn if the storage cannot rule out that two jobs get the lock.

        Returns:
            The owner of a stale lock that was replaced, None if there was none.

        Raises:
            BadInputError: another job has it, or the lock file cannot be read or written.
        """
        stale: LockOwner | None = None
        vanished = 0
        try:
            while not (created := self._storage.create(LOCK_NAME, self._content)):
                found = self._read()
                if created is False and found is None:
                    vanished += 1
                    self._check_vanished(vanished)
                if found is not None and found.identity != self._owner.identity:
                    if self._is_stale(found):
                        stale = found
                        self._storage.remove(LOCK_NAME)
                elif found is not None or created is None:
                    self._storage.write(LOCK_NAME, [self._content])
                    break
            if created is None:
                self._say(
                    f"holdfast: warning: {self._storage.where} cannot create a file only if it does not exist: two "
                    "jobs that start there at the same moment could both get the lock"
                )
        except OSError as error:
            raise BadInputError(
                f"the lock file {self._where} cannot be written: {error_text(error)}; check its permissions"
            ) from None
        self._renewer = threading.Thread(target=self._renew, name="holdfast-lock", daemon=True)
        self._renewer.start()
        return stale

    def release(self) -> None:
        """Stop renewing the lock, and remove it if this process still has it. A second call does nothing.

        Errors are ignored, because the next job finds out that the lock is stale.
        """
        self._released.set()
        if self._renewer is None:
            return
        self._renewer.join(self._renew_s)
        self._renewer = None
        try:
            found = self._read()
            mine = self._owner
            if found is not None and (found.identity, found.host, found.pid) == (mine.identity, mine.host, mine.pid):
                self._storage.remove(LOCK_NAME)
        except (OSError, BadInputError):
            pass  # the next job watches the file and finds that it is stale

    @property
    def _content(self) -> bytes:
        return msgspec.json.encode(self._owner)

    @property
    def _where(self) -> str:
        return f"{self._storage.where}/{LOCK_NAME}"

    def _read(self) -> LockOwner | None:
        """Return the content of the lock file, or None if there is no lock.

        Raises:
            BadInputError: the file cannot be read.
        """
        try:
            return msgspec.json.decode(self._storage.read(LOCK_NAME, _MAX_BYTES), type=LockOwner)
        except FileNotFoundError:
            return None
        except OSError as error:
            why = error_text(error)
        except MALFORMED as error:
            why = str(error)
        raise BadInputError(
            f"the lock file {self._where} cannot be read: {why}; if no other job uses this directory, remove the file"
        )

    def _check_vanished(self, times: int) -> None:
        """Wait a moment, because another job may have removed its lock since `create` found it.

        Raises:
            BadInputError: it happened `_MAX_VANISHED` times: the lock is a link to a missing file, or cannot be opened.
        """
        if times >= _MAX_VANISHED:
            raise BadInputError(
                f"the lock file {self._where} exists, but nothing can be read there (a link to a missing file?); "
                "if no other job uses this directory, remove the file"
            )
        time.sleep(self._renew_s / 4)

    def _is_stale(self, found: LockOwner) -> bool:
        """Watch another job's lock for `watch_s` seconds; return whether it stayed unchanged and can be removed.

        Return False at once if it was removed meanwhile.

        Raises:
            BadInputError: the lock was renewed, so that job runs.
        """
        self._say(
            f"holdfast: {self._storage.where} is locked by {found}: checking for {self._watch_s:g} s whether it runs"
        )
        until = time.monotonic() + self._watch_s
        while time.monotonic() < until:
            time.sleep(self._renew_s / 4)
            now = self._read()
            if now is None:
                return False
            if now != found:
                raise BadInputError(
                    f"the checkpoint directory {self._storage.where} is used by {now}, which runs: give another "
                    "--checkpoint-dir, or end that job first"
                )
        return True

    def _renew(self) -> None:
        """Renew the lock every `renew_s` seconds until it is released, also after errors of the storage.

        If another job has taken it, warn and stop renewing.
        """
        while not self._released.wait(self._renew_s):
            self._owner = msgspec.structs.replace(self._owner, renewals=self._owner.renewals + 1)
            try:
                found = self._read()
                if found is not None and found.identity != self._owner.identity:
                    self._say(
                        f"holdfast: warning: {found} has taken the lock of {self._storage.where}; both write to it"
                    )
                    return
                self._storage.write(LOCK_NAME, [self._content])
            except (OSError, BadInputError):
                continue  # a running job goes on without its lock while the storage is away


@contextmanager
def locked_directory(
    directory: str, owner: LockOwner, say: Callable[[str], None], *, running: bool = False
) -> Generator[LockOwner | None]:
    """Hold the lock of a checkpoint directory, "" for none. Yield the owner of a stale lock that was replaced, or None.

    Args:
        running: whether the job trains already. If so, problems with the lock are only printed.

    Raises:
        BadInputError: as `CheckpointLock.acquire`.
    """
    if not directory:
        yield None
        return
    lock, stale = CheckpointLock(directory, owner, say), None
    try:
        stale = lock.acquire()
    except BadInputError as error:
        if not running:
            raise
        say(f"holdfast: warning: {error}; this job trains already, and goes on")
    try:
        yield stale
    finally:
        lock.release()
