"""Ends all processes that a test run has started, even if pytest is interrupted or killed.

`start_guard` runs this file as a separate process. It waits until the test run's end of a pipe is closed, which the
kernel does when that process ends, at the latest. It recognises processes by an environment variable, which children
inherit.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

VARIABLE = "HOLDFAST_TEST_RUN"
#: The time for a clean exit, in seconds.
GRACE_S = 5.0
_LOOK_S = 0.05


def start_guard() -> subprocess.Popen[bytes] | None:
    """Mark this process and its later children, and start the guard; return None if another process has done so."""
    if VARIABLE in os.environ:
        return None  # This is an xdist process.
    mark = os.environ[VARIABLE] = secrets.token_hex(8)
    # Start a new session, so that Ctrl-C in the terminal does not end the guard.
    command = [sys.executable, "-I", __file__, mark, str(os.getpid())]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)


def end_guard(guard: subprocess.Popen[bytes]) -> None:
    """End the remaining processes of the tests, then the guard."""
    os.environ.pop(VARIABLE, None)
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait()


def marked(mark: str, but: int) -> list[int]:
    """Return the processes of a test run, except the one that runs it."""
    found: list[int] = []
    wanted = f"{VARIABLE}={mark}".encode()
    for entry in Path("/proc").iterdir():
        # A process that has just ended, or belongs to another user, cannot be read.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != but and wanted in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def end_all(mark: str, but: int) -> None:
    """End the processes of a run, first with SIGTERM, then with SIGKILL."""
    deadline, signalled = time.monotonic() + GRACE_S, set[int]()
    while left := marked(mark, but):
        late = time.monotonic() > deadline
        for pid in left:
            if late or pid not in signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        signalled.update(left)
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_all(sys.argv[1], int(sys.argv[2]))
