"""The zygote: a process with everything heavy imported that forks worker processes on request.

`import torch` costs 1-2 s, a fork 5-40 ms. The zygote never starts a thread and never runs an operation, so that what
it forks is as good as a cold start. It knows torch only by the names it is told to import.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import glob
import importlib
import io
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from holdfast.control.agent.worker_process import run_script
from holdfast.control.link.forking import PRELOAD, Exited, Fork, Forked, ForkFailed, Streams, ZygoteReply
from holdfast.control.link.framing import FrameDecoder, FrameError, encode_frame
from holdfast.control.owned_folders import remove_abandoned_folders
from holdfast.control.process_template import serve
from holdfast.control.processes import die_with_parent, outlive_parent, print_error

#: Processes may end a little later than the killed process that started them and the zygote.
_REMOVE_TRIES = 50
_CHUNK = 1 << 16
#: descriptors that come with a requester's first words: stdout and stderr, and perhaps one for a process of its own
_STREAMS, _MOST = 2, 3
_REMOVE_PAUSE_S = 0.1


class _Requester:
    """The connection of an agent, or of a worker that wants a loader worker."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.decoder: FrameDecoder[Streams | Fork] = FrameDecoder(Streams | Fork)
        #: its stdout and stderr, once they have come
        self.streams: list[int] = []

    def receive(self) -> bytes:
        """Return received bytes, or b"" at the end. The first call also receives the descriptors (`streams`)."""
        if self.streams:
            return self.connection.recv(_CHUNK)
        data, self.streams, _, _ = socket.recv_fds(self.connection, _CHUNK, _MOST)
        return data

    def close_child_stream(self) -> None:
        """Close our copy of the third descriptor: an open copy would hide the end of the child process."""
        for stream in self.streams[_STREAMS:]:
            os.close(stream)
        del self.streams[_STREAMS:]

    def close(self) -> None:
        """Close the connection, and the descriptors that came over it."""
        self.connection.close()
        for stream in self.streams:
            os.close(stream)


class Zygote:
    """The server loop. `serve` returns None at the end of the lifeline, and in a forked child the child's request.

    `channel`: in a child, its own descriptor, or -1.
    """

    def __init__(self, listener: socket.socket, lifeline: int) -> None:
        self._listener = listener
        self._lifeline = lifeline
        self.channel = -1
        self._requesters: list[_Requester] = []
        self._children: dict[int, tuple[int, _Requester]] = {}  # pidfd -> pid and who asked for it
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(lifeline, selectors.EVENT_READ, None)

    def serve(self) -> Fork | None:
        """Accept requesters, fork for them, and report the exits of the children.

        Return None at the end of the lifeline, once all children are killed; in a forked child, return its request.
        """
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._lifeline:
                    if not os.read(self._lifeline, 4096):
                        self._end()
                        return None
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, int):
                    self._reap(key.fileobj)
                else:
                    fork = self._on_request(key.data)
                    if fork is not None:
                        return fork

    def _accept(self) -> None:
        """Accept a connection, and wait for its requests."""
        connection, _ = self._listener.accept()
        requester = _Requester(connection)
        self._requesters.append(requester)
        self._selector.register(connection, selectors.EVENT_READ, requester)

    def _on_request(self, requester: _Requester) -> Fork | None:
        """Read from a requester, and fork for each request. In a forked child return its request, else None.

        A requester is dropped at the end of its connection, or if that is broken.
        """
        if requester not in self._requesters:
            return None  # dropped while this event was under way
        try:
            data = requester.receive()
            forks = [one for one in requester.decoder.feed(data) if isinstance(one, Fork)] if data else []
        except ConnectionResetError:
            data, forks = b"", []  # it died before it had read all that was sent to it
        except (OSError, FrameError) as error:
            print_error(f"holdfast zygote: a requester's connection is broken: {error}")
            data, forks = b"", []
        if not data:
            self._drop_requester(requester)
        for fork in forks:
            if self._fork(requester, fork):
                return fork
        return None

    def _fork(self, requester: _Requester, fork: Fork) -> bool:
        """Fork a process for a request, and send its pid, or why there is none, to the requester.

        Return True in the child, which has the requester's stdout and stderr, the third descriptor (if any) as
        `channel`, and nothing of the zygote's. A child that runs a module ends with the zygote. Return False in the
        zygote.
        """
        mine = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            requester.close_child_stream()
            self._reply(requester, ForkFailed(request=fork.request, why=str(error)))
            return False
        if pid == 0:
            if fork.module:
                die_with_parent(mine)  # A worker continues without its zygote, and gets other loader workers.
            _redirect_output(requester.streams[:_STREAMS])
            self.channel = os.dup(requester.streams[_STREAMS]) if len(requester.streams) > _STREAMS else -1
            self._close_descriptors()
            return True
        requester.close_child_stream()
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, requester)
        self._selector.register(pidfd, selectors.EVENT_READ, None)
        self._reply(requester, Forked(request=fork.request, pid=pid))
        return False

    def _reap(self, pidfd: int) -> None:
        """Reap an ended child, and send its exit code to the requester."""
        pid, requester = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._reply(requester, Exited(pid=pid, code=os.waitstatus_to_exitcode(status)))

    def _reply(self, requester: _Requester, reply: ZygoteReply) -> None:
        """Send a reply, unless the requester was dropped. If that fails, drop it now."""
        if requester not in self._requesters:
            return
        try:
            requester.connection.sendall(encode_frame(reply))
        except OSError:
            self._drop_requester(requester)

    def _drop_requester(self, requester: _Requester) -> None:
        """Close a requester's connection, and SIGKILL the processes that were forked for it.

        If an agent dies, its workers must end, too, so that the whole node is gone.
        """
        if requester not in self._requesters:
            return
        self._requesters.remove(requester)
        self._selector.unregister(requester.connection)
        requester.close()
        for pidfd, (_, asked_by) in self._children.items():
            if asked_by is requester:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _end(self) -> None:
        for requester in list(self._requesters):
            self._drop_requester(requester)

    def _close_descriptors(self) -> None:
        """Close all descriptors of the zygote, in a forked child."""
        self._selector.close()
        self._listener.close()
        os.close(self._lifeline)
        for requester in self._requesters:
            requester.close()
        for pidfd in self._children:
            os.close(pidfd)


def _redirect_output(streams: list[int]) -> None:
    """Use these descriptors as stdout and stderr."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)


def preload(names: list[str]) -> None:
    """Import modules by name. A missing module is skipped, and reported unless it belongs to holdfast.

    Other errors of an import are raised.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("holdfast"):
                print_error(f"holdfast zygote: {name} is not preloaded: {error}")


def set_up_child(fork: Fork) -> None:
    """Make a forked child equal to a newly started process.

    It gets its own process group, default signal handlers, no stdin, the requested output files, environment, working
    directory and arguments, and newly seeded random generators.
    """
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if fork.output:
        for number, path in ((1, fork.output), (2, fork.errors or fork.output)):
            output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, number)
            os.close(output)
    os.environ.update(fork.env)
    os.chdir(fork.cwd)
    if fork.script:
        sys.argv = [fork.script, *fork.args]
        # The zygote runs with -P, so it has no entry of its own there.
        sys.path.insert(0, fork.cwd if fork.as_module else str(Path(fork.script).parent))
    reseed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # A worker's output must not be lost when it is killed.


def reseed() -> None:
    """Seed the global generators of torch and NumPy from the system, if they are imported.

    Otherwise all children continue the random numbers of the zygote: a script without a seed makes the same data on all
    nodes of one machine, and other data on another machine.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def main() -> int:
    """Run the zygote, or with `--template` the process template; return 0 at the end of its lifeline.

    A forked child runs the worker's script, or the requested module, and does not return.
    """
    parser = argparse.ArgumentParser(prog="python -m holdfast.control.agent.zygote", description=__doc__)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--listen-fd", type=int, help="a listening Unix socket, inherited")
    way.add_argument("--template", action="store_true", help="fork zygotes, as requested over stdin, a socket")
    parser.add_argument("--preload", default=",".join(PRELOAD), help="modules to import first")
    parser.add_argument("--remove", default="", help="a folder to remove at the end")
    parser.add_argument(
        "--abandoned", default="", help="a pattern of folders to remove then, too, if no one locks them"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The lifeline is stdin: it ends with the process that started the zygote.
    lifeline = os.dup(0)
    listener = None if options.template else socket.socket(fileno=options.listen_fd)
    if listener is not None:
        os.set_inheritable(listener.fileno(), False)
    # While it imports, the kernel ends it together with its parent, for it has nothing to remove yet.
    if not options.remove:
        die_with_parent(os.getppid())
    if not select.select([lifeline], [], [], 0)[0]:
        preload([name for name in options.preload.split(",") if name])
    gc.collect()
    gc.freeze()  # so that a child's collections do not copy the pages that all share
    if listener is None:
        place = serve(socket.socket(fileno=lifeline))
        if place is None:
            return 0
        listener, lifeline = place
    if not options.remove:
        outlive_parent()
    live(Zygote(listener, lifeline))
    if options.remove:
        remove(Path(options.remove), options.abandoned)
    return 0


def live(zygote: Zygote) -> None:
    """Serve until the lifeline ends. A forked child carries out its request, and does not return."""
    fork = zygote.serve()
    if fork is None:
        return
    set_up_child(fork)
    if fork.module:
        exit_quickly(importlib.import_module(fork.module).main(zygote.channel))
    exit_quickly(run_script(fork.script, fork.as_module))


def remove(folder: Path, abandoned: str = "") -> None:
    """Remove a folder. Try for some seconds, because processes that are about to end may still create files in it.

    If it remains, it is left without an error.

    Args:
        abandoned: the pattern of folders to remove as well, once the processes that lock them have ended.
    """
    for _ in range(_REMOVE_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        remove_abandoned_folders(abandoned)
        if not (folder.exists() or glob.glob(abandoned)):
            return
        time.sleep(_REMOVE_PAUSE_S)


def exit_quickly(code: int) -> NoReturn:
    """End a worker process like the interpreter, but without destroying modules, which takes 0.5 s with torch."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType] - the interpreter calls it, too
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] - the same
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
