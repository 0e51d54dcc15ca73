"""Forks the holdfast processes that a command starts from its initial state, so that no module is imported again.

They are the command's children, as usual: each is forked twice (as in holdfast.control.process_template) while the
command adopts orphans.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NoReturn

import msgspec

from holdfast.control.agent.zygote import exit_quickly
from holdfast.control.processes import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES, _MOST_DESCRIPTORS = 1 << 17, 16
#: Higher than any descriptor that our processes inherit.
_OUT_OF_THE_WAY = 500

_popen = subprocess.Popen


class Order(msgspec.Struct):
    """Run this command; `targets` are the numbers of its descriptors, in the order in which they are sent."""

    command: list[str]
    environment: dict[str, str]
    targets: list[int]


def fork_what_is_ours() -> None:
    """Fork all further processes that run a module of holdfast, instead of starting them."""
    nursery = _Nursery()

    def start(command: Sequence[str], **how: Any) -> Any:
        if how.get("process_group") != 0 or not _is_ours(command):
            return _popen(command, **how)
        return _Forked(nursery, command, **how)

    subprocess.Popen = start  # pyright: ignore


def _is_ours(command: Sequence[str]) -> bool:
    _, first, second, *rest = command
    if (first, second) == ("-P", "-m"):
        return rest[0].startswith("holdfast.")
    return first == "-c" and second.startswith("from holdfast.")


class _Forked:
    """The part of subprocess.Popen that holdfast.control.processes uses."""

    def __init__(
        self,
        nursery: _Nursery,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None,
        stdin: int | IO[Any],
        stdout: int | IO[Any] | None,
        pass_fds: Sequence[int],
        **_: object,
    ) -> None:
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        mine: list[int] = []
        if stdin == subprocess.PIPE:
            its, ours = os.pipe()
            self.stdin = os.fdopen(ours, "wb", buffering=0)
            mine.append(its)
        elif stdin == subprocess.DEVNULL:
            its = os.open(os.devnull, os.O_RDONLY)
            mine.append(its)
        else:
            its = stdin if isinstance(stdin, int) else stdin.fileno()
        out = 1 if stdout is None else stdout if isinstance(stdout, int) else stdout.fileno()
        descriptors = [its, out, 2 if stdout is None else out, *pass_fds]
        order = Order(list(command), dict(os.environ if env is None else env), [0, 1, 2, *pass_fds])
        try:
            self.pid = nursery.fork(order, descriptors)
        finally:
            for descriptor in mine:
                os.close(descriptor)

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None else self._reap(os.WNOHANG)

    def wait(self) -> int:
        code = self.returncode if self.returncode is not None else self._reap(0)
        assert code is not None
        return code

    def _reap(self, how: int) -> int | None:
        pid, status = os.waitpid(self.pid, how)
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class _Nursery:
    """A copy of this process in its initial state, which forks others."""

    def __init__(self) -> None:
        self._asks, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if os.fork() == 0:
            self._asks.close()
            die_with_parent(parent)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            with suppress(ConnectionError):
                _serve(its)
            os._exit(0)
        its.close()

    def fork(self, order: Order, descriptors: Sequence[int]) -> int:
        """Fork a child of this process with these descriptors."""
        _adopt(True)
        try:
            socket.send_fds(self._asks, [msgspec.msgpack.encode(order)], descriptors)
            return int(self._asks.recv(64))
        finally:
            _adopt(False)


def _adopt(orphans: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0) == 0


def _serve(asked: socket.socket) -> None:
    while True:
        data, descriptors, _, _ = socket.recv_fds(asked, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not data:
            return
        orphaned, parent_is_gone = os.pipe()
        pid_read, pid_written = os.pipe()
        pid = os.fork()
        if pid == 0:
            grandchild = os.fork()
            if grandchild:
                os.setpgid(grandchild, grandchild)
                os.write(pid_written, b"%d" % grandchild)
                os._exit(0)
            asked.close()
            for descriptor in (parent_is_gone, pid_read, pid_written):
                os.close(descriptor)
            os.read(orphaned, 1)  # Until then, some processes would look for another parent.
            os.close(orphaned)
            _become(msgspec.msgpack.decode(data, type=Order), descriptors)
        os.waitpid(pid, 0)
        asked.send(os.read(pid_read, 64))
        for descriptor in (*descriptors, orphaned, parent_is_gone, pid_read, pid_written):
            os.close(descriptor)


def _become(order: Order, descriptors: Sequence[int]) -> NoReturn:
    """Run as the command would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, target in zip(aside, order.targets, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(order.environment)
    _, how, second, *rest = order.command
    try:
        if how == "-c":
            sys.argv = ["-c", *rest]
            exec(second, {"__name__": "__main__"})
            exit_quickly(0)
        sys.argv = rest
        exit_quickly(importlib.import_module(rest[0]).main())
    except SystemExit as end:
        exit_quickly(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:  # noqa: BLE001 - the last frame of the process
        traceback.print_exc()
        exit_quickly(1)
