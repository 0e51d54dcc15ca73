"""The memory of a unit's proposals: made by the agent, one for each unit that is formed; opened by its places.

It has no name (memfd): a place opens it through its agent's descriptor in /proc, so that none is left behind. The lock
is one of POSIX on the file: the kernel gives it back when its process ends, however that happens, and no child of that
process holds it on.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from holdfast.control.link.progress_page import AgentMemory
from holdfast.control.link.unit.proposals import WORD_BYTES, ProposalTable, words_of


class ProposalPage(AgentMemory):
    """An agent's own page."""

    def __init__(self, places: int) -> None:
        """Make it.

        Raises:
            OSError: there is no memory for it, or no memfd.
        """
        super().__init__("holdfast-proposals", words_of(places) * WORD_BYTES)


class _PageLock:
    """Shuts out other processes, not other threads of this one."""

    def __init__(self, file: int) -> None:
        self._file = file

    def __enter__(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)


class Proposals(ProposalTable):
    """A place's own end of its unit's page, as long as its process lives: a process opens a page once, and for good.

    (To close any descriptor of the file would give the lock back.)
    """

    def __init__(self, path: str, *, place: int, places: int) -> None:
        """Open the page of an agent.

        Raises:
            OSError: there is none.
        """
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._page = mmap.mmap(file, words_of(places) * WORD_BYTES)
        except (OSError, ValueError) as error:
            os.close(file)
            raise OSError(f"{path} is no page for {places} places: {error}") from None
        super().__init__(memoryview(self._page).cast("Q"), _PageLock(file), place=place, places=places)
