"""The mould: a process with everything heavy imported that forks zygotes, so that only the first of them takes long.

It belongs to no job: it runs nothing of anybody's, listens nowhere, and hears only whoever has started it, over a
socket that nobody else has. A zygote is forked twice: it is no child of the mould's, but of the nearest process above
that adopts orphans, as is whatever else loses its parent there.
"""

from __future__ import annotations

import contextlib
import operator
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.control.processes import ChildProcess

#: what a mould is asked for; with it come the zygote's listening socket and its lifeline
ZYGOTE = b"zygote"
#: what it says: it has imported everything; the zygote is there; a file that it has imported is not what it was
READY, FORKED, CHANGED = b"ready", b"forked", b"changed"
_MOST_BYTES, _DESCRIPTORS = 64, 2
#: whose numbers begin with what the system gave when they were imported, and how they begin with something else
_RANDOM = {"numpy.random": "seed", "torch": "default_generator.seed"}


class ZygotePlace(NamedTuple):
    """What a zygote begins with."""

    listener: socket.socket
    lifeline: int


class Loaded:
    """The files of what has been imported, and those that say where more can be, as they were."""

    def __init__(self) -> None:
        """Look at what this process has imported by now."""
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        self._were = {file: _looks(file) for file in files if isinstance(file, str)}
        self._places = _places()

    def changed(self) -> bool:
        """Tell whether any has changed: what is imported from here on may not go with what was, or not be found."""
        return self._places != _places() or any(_looks(file) != before for file, before in self._were.items())


def serve(requests: socket.socket) -> ZygotePlace | None:
    """Fork zygotes for whoever has the other end; return None once that is closed, in a zygote what it begins with."""
    loaded = Loaded()
    with contextlib.suppress(ConnectionError):  # (whoever asks has gone)
        requests.send(READY)
        while True:
            data, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, _DESCRIPTORS)
            if not data:
                break
            if loaded.changed():
                requests.send(CHANGED)
                break
            if _fork_twice():
                requests.close()
                return _begin(*descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            requests.send(FORKED)
    return None


def _begin(listener: int, lifeline: int) -> ZygotePlace:
    """Make of this grandchild a zygote like one that is started by itself."""
    os.setpgid(0, 0)
    os.dup2(lifeline, 0)
    for descriptor in (listener, lifeline):
        os.set_inheritable(descriptor, False)
    _draw_anew()
    return ZygotePlace(socket.socket(fileno=listener), lifeline)


def _draw_anew() -> None:
    """Have random numbers begin anew, as of a process that has imported by itself: else all jobs would draw the same.

    (`random` does that by itself, in each process that is forked.)
    """
    for name, seed in _RANDOM.items():
        if name in sys.modules:
            operator.attrgetter(seed)(sys.modules[name])()


def start_mould(environment: Mapping[str, str], preload: Sequence[str]) -> tuple[ChildProcess, socket.socket]:
    """Start a mould; return it, and the socket over which it is asked, which does not block.

    Raises:
        OSError: no process can be started.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", "-m", "holdfast.control.agent.zygote", "--mould", "--preload", ",".join(preload)]
    try:
        with its:
            child = ChildProcess(command, environment=environment, stdin=its.fileno())
    except OSError:
        ours.close()
        raise
    ours.setblocking(False)
    return child, ours


def _fork_twice() -> bool:
    """Tell whether this is the grandchild; the child has ended once that is there.

    Raises:
        SystemExit: the system has no process left to give.
    """
    try:
        pid = os.fork()
    except OSError as error:
        sys.exit(f"holdfast zygote: no other can be forked: {error}")
    if pid:
        _, status = os.waitpid(pid, 0)
        if status:
            sys.exit("holdfast zygote: no other can be forked")
        return False
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    return True


def _places() -> dict[str, tuple[int, int, int] | None]:
    """Return how the files are that Python reads at its start alone: what is installed may be found by them only."""
    found = dict[str, tuple[int, int, int] | None]()
    for folder in sys.path:
        with contextlib.suppress(OSError):
            found |= {file.path: _looks(file.path) for file in os.scandir(folder) if file.name.endswith(".pth")}
    return found


def _looks(file: str) -> tuple[int, int, int] | None:
    """Return what changes where a file does; None: it cannot be looked at."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
