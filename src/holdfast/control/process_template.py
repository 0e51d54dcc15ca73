"""The process template: a process with all heavy imports done that forks zygotes, so that only the first start is slow.

It belongs to no job, runs no user code, and opens no port. It gets requests only from its parent, over a private
socket. It forks a zygote twice, so that the zygote is not its child. Like other orphans, the zygote becomes a child of
the nearest process above that adopts orphans.
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

#: the request to a template; with it come the listening socket of the zygote and its lifeline
ZYGOTE = b"zygote"
#: messages of a template: its imports are done; the zygote is forked; an imported file has changed
READY = b"ready"
FORKED = b"forked"
CHANGED = b"changed"
_MAX_MESSAGE_BYTES = 64
_DESCRIPTORS = 2
#: modules with a random generator that is seeded by the system at import, and the functions that seed it again
_RANDOM = {"numpy.random": "seed", "torch": "default_generator.seed"}


class ZygoteResources(NamedTuple):
    """The resources with which a zygote starts."""

    listener: socket.socket
    lifeline: int


class ImportedFiles:
    """The state of the files of all imported modules, and of the files that tell Python where to find modules."""

    def __init__(self) -> None:
        """Record the modules that this process has imported so far."""
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        self._files = {file: _fingerprint(file) for file in files if isinstance(file, str)}
        self._path_files = _path_files()

    def has_changed(self) -> bool:
        """Return whether any file has changed, so that later imports may not match the earlier ones."""
        return self._path_files != _path_files() or any(
            _fingerprint(file) != before for file, before in self._files.items()
        )


def serve(requests: socket.socket) -> ZygoteResources | None:
    """Send `READY`, then fork a zygote for each request and answer with `FORKED`.

    Return None when the socket is closed, or after the answer `CHANGED` if an imported file has changed. In a forked
    zygote, return its resources.

    Raises:
        SystemExit: the system cannot create another process.
    """
    loaded = ImportedFiles()
    with contextlib.suppress(ConnectionError):  # the requester has ended
        requests.send(READY)
        while True:
            data, descriptors, _, _ = socket.recv_fds(requests, _MAX_MESSAGE_BYTES, _DESCRIPTORS)
            if not data:
                break
            if loaded.has_changed():
                requests.send(CHANGED)
                break
            if _fork_twice():
                requests.close()
                return _become_zygote(*descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            requests.send(FORKED)
    return None


def _become_zygote(listener: int, lifeline: int) -> ZygoteResources:
    """Turn this grandchild into a zygote, equal to one that was started directly, and return its resources.

    It gets its own process group, the lifeline as stdin, and newly seeded random generators.

    Args:
        listener: descriptor of the listening socket.
        lifeline: descriptor that ends with the process for which the zygote works.
    """
    os.setpgid(0, 0)
    os.dup2(lifeline, 0)
    for descriptor in (listener, lifeline):
        os.set_inheritable(descriptor, False)
    _reseed()
    return ZygoteResources(socket.socket(fileno=listener), lifeline)


def _reseed() -> None:
    """Seed the generators of torch and NumPy again, if they are imported.

    Otherwise all jobs would draw the same numbers. The module `random` does that itself in each forked process.
    """
    for name, seed in _RANDOM.items():
        if name in sys.modules:
            operator.attrgetter(seed)(sys.modules[name])()


def start_template(environment: Mapping[str, str], preload: Sequence[str]) -> tuple[ChildProcess, socket.socket]:
    """Start a template that imports the modules `preload`. Return it with the non-blocking socket for requests.

    Raises:
        OSError: no process can be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [
        sys.executable,
        "-P",
        "-m",
        "holdfast.control.agent.zygote",
        "--template",
        "--preload",
        ",".join(preload),
    ]
    try:
        with theirs:
            child = ChildProcess(command, environment=environment, stdin=theirs.fileno())
    except OSError:
        ours.close()
        raise
    ours.setblocking(False)
    return child, ours


def _fork_twice() -> bool:
    """Fork twice: return True in the grandchild, and False in the parent once the child has ended.

    Raises:
        SystemExit: the system cannot create another process.
    """
    try:
        pid = os.fork()
    except OSError as error:
        sys.exit(f"holdfast zygote: cannot fork another zygote: {error}")
    if pid:
        _, status = os.waitpid(pid, 0)
        if status:
            sys.exit("holdfast zygote: cannot fork another zygote")
        return False
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    return True


def _path_files() -> dict[str, tuple[int, int, int] | None]:
    """Return the state of the .pth files on `sys.path`, by path, as `_fingerprint` returns it.

    Python reads them only at its start, and they can add folders with modules.
    """
    found = dict[str, tuple[int, int, int] | None]()
    for folder in sys.path:
        with contextlib.suppress(OSError):
            found |= {file.path: _fingerprint(file.path) for file in os.scandir(folder) if file.name.endswith(".pth")}
    return found


def _fingerprint(file: str) -> tuple[int, int, int] | None:
    """Return values that change with a file, or None if it cannot be read."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
