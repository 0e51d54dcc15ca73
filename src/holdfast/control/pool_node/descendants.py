"""All processes that come of this one, whoever started them: nothing of a grant may be left behind.

Whoever loses its parent becomes a child of ours (PR_SET_CHILD_SUBREAPER), so that everything stays below this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections import defaultdict
from collections.abc import Collection

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Be the parent of all processes below this one whose own parent ends.

    Raises:
        OSError: the kernel does not do that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def descendants() -> list[int]:
    """Return the pids of all processes below this one, those that wait to be reaped included."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent_of(int(entry))) is not None:
            children[parent].append(int(entry))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        mine = children[waiting.pop()]
        found += mine
        waiting += mine
    return found


def kill_all() -> None:
    """SIGKILL all processes below this one."""
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap_orphans(known: Collection[int]) -> None:
    """Reap those that have ended and were left to us; `known`: children that somebody else here waits for."""
    for pid in descendants():
        if pid not in known:
            with contextlib.suppress(ChildProcessError):  # (not a child of ours, or reaped already)
                os.waitpid(pid, os.WNOHANG)


def _parent_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except OSError:
        return None
    return int(text[text.rindex(b")") + 2 :].split()[1])
