"""Child processes: started in their own process group, awaited without threads, and ended reliably."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import IO, Any

from holdfast.errors import EXIT_AFTER_SIGNAL

_log = logging.getLogger("holdfast.processes")

_PR_SET_PDEATHSIG = 1

#: A process that is stopped (SIGSTOP) for this long is ended: two leases. After the first one its job goes on without
#: it; until the end of the second one it may wake up and come back.
FROZEN_S = 6.0
#: checks of the process within that time
_FROZEN_CHECKS = 8


def die_with_parent(parent: int) -> None:
    """Make the kernel SIGKILL this process when its parent ends.

    Args:
        parent: the parent's pid. If it ended before this call, this process is killed now.

    Raises:
        OSError: the kernel refuses.
    """
    _at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _at_parents_end(0)


def _at_parents_end(number: int) -> None:
    """Set the signal that the kernel sends to this process when its parent ends, or 0 for none.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")


def ending_signals() -> dict[signal.Signals, int]:
    """Return the signals that end this process in good order (SIGINT, SIGTERM, SIGHUP), with the exit code of each.

    SIGHUP is not one of them if it was inherited as ignored (nohup): the user wants the process to outlive the
    terminal. SIGINT always is: shells start background commands with SIGINT ignored.
    """
    codes = {signal.Signals[name]: code for name, code in EXIT_AFTER_SIGNAL.items()}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        del codes[signal.SIGHUP]
    return codes


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal (state T in /proc). False if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except OSError:
        return False
    return text[text.rindex(b")") + 2 :][:1] == b"T"


def print_error(line: str) -> None:
    """Print one line on stderr with one write, so that lines of other processes do not mix with it."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def blocked_sigint() -> Generator[None]:
    """Block SIGINT in this thread, and in the processes that it starts until they use `handled_sigint`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def handled_sigint() -> Generator[None]:
    """Unblock SIGINT for a process's work, which raises KeyboardInterrupt; then ignore SIGINT.

    A SIGINT that was blocked before is raised at once. Outside of this, during imports and at the end of the process,
    a KeyboardInterrupt would only print a traceback.
    """
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


async def wait_or_end_frozen(child: ChildProcess, frozen_s: float = FROZEN_S) -> int:
    """Wait for the end of a child, as `ChildProcess.wait`. SIGKILL it if it stays stopped by a signal (SIGSTOP).

    A stopped process does not end, so a successor that waits for its end would never start.

    Args:
        child: the process.
        frozen_s: seconds that it may be stopped. Each check must find it stopped, because time alone proves nothing if
            this process was stopped, too.
    """
    ended = asyncio.ensure_future(child.wait())
    checks = 0
    try:
        while not ended.done():
            await asyncio.wait((ended,), timeout=frozen_s / _FROZEN_CHECKS)
            checks = checks + 1 if not ended.done() and is_stopped(child.pid) else 0
            if checks >= _FROZEN_CHECKS:
                _log.warning("process %d was stopped for %g s: it is killed (SIGKILL)", child.pid, frozen_s)
                child.send_signal(signal.SIGKILL)
                checks = 0
        return ended.result()
    finally:
        ended.cancel()


def describe_exit(code: int) -> str:
    """Return "exit code N", or for a negative code the signal that ended the process, such as "SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class ProcessHandle:
    """A process by its pidfd: signals reach this very process, never a later one with the same pid."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1  # it has ended and was reaped already

    @property
    def is_reaped(self) -> bool:
        """Whether the process was reaped, so that it can no longer be signalled."""
        return self._fd < 0

    def has_ended(self) -> bool:
        """Return whether the process has ended. Its parent may not have reaped it yet."""
        return self._fd < 0 or bool(select.select([self._fd], [], [], 0)[0])

    def send_signal(self, number: int) -> None:
        """Signal the process. Ignored if it has ended."""
        if self._fd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    async def wait_ended(self) -> None:
        """Wait until the process has ended. Its parent may not have reaped it yet. After `close`, return at once."""
        if self._fd < 0:
            return
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        watched = os.dup(self._fd)
        loop.add_reader(watched, lambda: done.done() or done.set_result(None))
        try:
            await done
        finally:
            loop.remove_reader(watched)
            os.close(watched)

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ChildProcess:
    """A child process of ours, in its own process group, so that a terminal's Ctrl-C does not reach it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start it.

        Raises:
            OSError: the program cannot be started.
        """
        self._process = subprocess.Popen(
            list(command),
            env=None if environment is None else dict(environment),
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.STDOUT if stdout is not None else None,
            pass_fds=pass_fds,
            process_group=0,
        )
        self._handle = ProcessHandle(self._process.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def stdin(self) -> IO[Any] | None:
        """The pipe to its stdin, if one was requested."""
        return self._process.stdin

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """Signal it, if it still runs."""
        if self.code is None:
            self._handle.send_signal(number)

    async def wait(self) -> int:
        """Wait for its end, reap it, and return its exit code (negative for a signal)."""
        await self._handle.wait_ended()
        return self.reap()

    def reap(self) -> int:
        """Block until the child ends, close its descriptors, and return its exit code (negative for a signal)."""
        code = self._process.wait()
        self._handle.close()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        return code


async def end_all(children: Iterable[ChildProcess], *, grace_s: float, first: int = signal.SIGTERM) -> None:
    """Ask children to end, SIGKILL the remaining ones after `grace_s`, and return when all are reaped.

    Stopped children are continued (SIGCONT), so that they can end. Ended ones are ignored.

    Args:
        children: the processes.
        grace_s: seconds that they may take.
        first: the signal that asks them to end.
    """
    running = [child for child in children if child.code is None]
    for child in running:
        child.send_signal(first)
        child.send_signal(signal.SIGCONT)
    waits = [asyncio.ensure_future(child.wait()) for child in running]
    if not waits:
        return
    _, late = await asyncio.wait(waits, timeout=grace_s)
    for child in running:
        if child.code is None:
            child.send_signal(signal.SIGKILL)
    if late:
        await asyncio.wait(late)
