"""All descendants of this process. No process may outlive its grant.

Orphans become children of this process (PR_SET_CHILD_SUBREAPER), so that all stay below it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Collection

_PR_SET_CHILD_SUBREAPER = 36
_REAP_POLL_S = 0.02


def adopt_orphans() -> None:
    """Become the parent of all descendants that lose their parent.

    Raises:
        OSError: the kernel does not support it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def find_descendants(but: Collection[int] = (), *, trees: bool = False) -> list[int]:
    """Return the pids of all descendants of this process, including zombies.

    Args:
        but: pids to leave out; their descendants are included.
        trees: whether to leave out their descendants, too.
    """
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent_of(int(entry))) is not None:
            children[parent].append(int(entry))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = children[waiting.pop()]
        others = [pid for pid in below if pid not in but]
        found += others
        waiting += others if trees else below
    return found


def kill_all(but: Collection[int] = (), *, trees: bool = False) -> None:
    """SIGKILL all descendants.

    Args:
        but: pids that are not killed; their descendants are.
        trees: whether to leave out their descendants, too.
    """
    for pid in find_descendants(but, trees=trees):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap_orphans(known: Collection[int]) -> None:
    """Reap ended orphans that this process has adopted.

    Args:
        known: pids of children that other code here waits for.
    """
    for pid in find_descendants(known):
        with contextlib.suppress(ChildProcessError):  # not our child, or reaped already
            os.waitpid(pid, os.WNOHANG)


async def end_all_below(but: Callable[[], Collection[int]], *, trees: bool = False) -> None:
    """Kill all descendants, and return once none is left.

    Args:
        but: returns pids that are not killed; their descendants are.
        trees: whether to leave out their descendants, too.
    """
    while find_descendants(but(), trees=trees):
        kill_all(but(), trees=trees)
        reap_orphans(but())
        await asyncio.sleep(_REAP_POLL_S)


def _parent_of(pid: int) -> int | None:
    """Return the pid of a process's parent, or None if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except OSError:
        return None
    return int(text[text.rindex(b")") + 2 :].split()[1])
