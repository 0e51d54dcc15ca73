"""Ends all processes that a run of the tests has started, however the run ends: pytest may be interrupted, or killed.

`start_guard` starts this file as a process of its own. It waits until the tests' end of a pipe is closed, which the
kernel does at the latest when their process ends. It knows the processes by a variable of the environment, which each
process inherits from the one that starts it.
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
#: how long processes may take to end in good order, in seconds
GRACE_S = 5.0
_LOOK_S = 0.05


def start_guard() -> subprocess.Popen[bytes] | None:
    """Mark this process and all that it starts from here on, and start the guard; None if another has done so."""
    if VARIABLE in os.environ:
        return None  # this is a process of xdist's
    mark = os.environ[VARIABLE] = secrets.token_hex(8)
    # A session of its own: Ctrl-C in the terminal must not end it.
    command = [sys.executable, "-I", __file__, mark, str(os.getpid())]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)


def end_guard(guard: subprocess.Popen[bytes]) -> None:
    """The tests are over: end what is left of them, then the guard."""
    os.environ.pop(VARIABLE, None)
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait()


def marked(mark: str, but: int) -> list[int]:
    """Return the processes of a run of the tests, without the one that runs them."""
    found: list[int] = []
    wanted = f"{VARIABLE}={mark}".encode()
    for entry in Path("/proc").iterdir():
        # A process that ends meanwhile, or is another user's, cannot be read.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != but and wanted in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def end_all(mark: str, but: int) -> None:
    """End the processes of a run: first in good order, then for certain."""
    deadline, told = time.monotonic() + GRACE_S, set[int]()
    while left := marked(mark, but):
        late = time.monotonic() > deadline
        for pid in left:
            if late or pid not in told:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        told.update(left)
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_all(sys.argv[1], int(sys.argv[2]))
