"""All processes that come of this one, whoever started them: nothing of a grant may be left behind.

Whoever loses its parent becomes a child of ours (PR_SET_CHILD_SUBREAPER), so that everything stays below this process.
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
    """Be the parent of all processes below this one whose own parent ends.

    Raises:
        OSError: the kernel does not do that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def descendants(but: Collection[int] = (), *, trees: bool = False) -> list[int]:
    """Return the pids of all processes below this one, those that wait to be reaped included.

    Args:
        but: not these; what is below them all the same. trees: nor that.
    """
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent_of(int(entry))) is not None:
            children[parent].append(int(entry))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        mine = children[waiting.pop()]
        others = [pid for pid in mine if pid not in but]
        found += others
        waiting += others if trees else mine
    return found


def kill_all(but: Collection[int] = (), *, trees: bool = False) -> None:
    """SIGKILL all processes below this one but these; `trees`: and what is below them."""
    for pid in descendants(but, trees=trees):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap_orphans(known: Collection[int]) -> None:
    """Reap those that have ended and were left to us; `known`: children that somebody else here waits for."""
    for pid in descendants(known):
        with contextlib.suppress(ChildProcessError):  # (not a child of ours, or reaped already)
            os.waitpid(pid, os.WNOHANG)


async def end_all_below(but: Callable[[], Collection[int]], *, trees: bool = False) -> None:
    """Kill all processes below this one but those that `but` names, and return once none is left.

    Args:
        trees: what is below those is left alone, too.
    """
    while descendants(but(), trees=trees):
        kill_all(but(), trees=trees)
        reap_orphans(but())
        await asyncio.sleep(_REAP_POLL_S)


def _parent_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except OSError:
        return None
    return int(text[text.rindex(b")") + 2 :].split()[1])
