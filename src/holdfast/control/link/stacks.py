"""Stack dumps of a worker's threads, requested by a signal, so that no Python code of the process has to run.

Python's faulthandler writes them in C, within the signal handler. So a thread that holds the interpreter lock forever
does not prevent them. Only a stopped process does not answer.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import IO

#: a signal that neither Python, torch nor a batch system uses
STACKS_SIGNAL = signal.SIGRTMAX - 3


def dump_stacks_on_signal(path: str) -> IO[str]:
    """Append the stacks of all threads to the file `path` whenever `STACKS_SIGNAL` arrives.

    The file appears once the handler is installed. The returned file must stay open.

    Raises:
        OSError: the file cannot be created.
    """
    file = open(f"{path}.new", "a", encoding="utf-8")  # noqa: SIM115 (it stays open)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    # The name appears last: before the handler is registered, the signal would end the process.
    os.rename(file.name, path)
    return file
