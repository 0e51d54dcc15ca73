"""Where a worker's threads stand in its program: asked for by a signal, so that nothing in the process has to run.

Python's faulthandler answers from within the signal's handler, in C: a thread that holds the interpreter's lock for
ever does not keep it from it. Only a process that is stopped says nothing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import IO

#: one that neither Python, torch nor a batch system uses
STACKS_SIGNAL = signal.SIGRTMAX - 3


def answer_with_stacks(path: str) -> IO[str]:
    """Append this process's stacks to a file whenever it is asked for them; the file must stay open.

    Raises:
        OSError: the file cannot be made.
    """
    file = open(f"{path}.new", "a", encoding="utf-8")  # noqa: SIM115 (it is written to for as long as the process lives)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    os.rename(file.name, path)  # (where there is none of this name, the signal would end the process)
    return file
