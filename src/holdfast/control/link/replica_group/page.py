"""The shared memory of a replica group's proposals: the agent creates one page for each group, and its workers open it.

It has no name (memfd). A worker opens it through its agent's descriptor in /proc, so no file can remain behind. The
lock is a POSIX lock on the file: the kernel releases it whenever its process ends, and child processes do not inherit
it.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from holdfast.control.link.progress_page import AgentMemory
from holdfast.control.link.replica_group.proposals import WORD_BYTES, ProposalTable, count_words


class ProposalPage(AgentMemory):
    """The agent's own page."""

    def __init__(self, places: int) -> None:
        """Create it.

        Raises:
            OSError: there is not enough memory, or the system has no memfd.
        """
        super().__init__("holdfast-proposals", count_words(places) * WORD_BYTES)


class _PageLock:
    """A lock between processes, not between the threads of one process."""

    def __init__(self, file: int) -> None:
        self._file = file

    def __enter__(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)


class MappedProposals(ProposalTable):
    """A worker's view of its group's page. A process opens a page once, and keeps it open until its end.

    Closing any descriptor of the file would release the lock.
    """

    def __init__(self, path: str, *, place: int, places: int) -> None:
        """Open the page of an agent.

        Raises:
            OSError: it does not exist, or has the wrong size.
        """
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._page = mmap.mmap(file, count_words(places) * WORD_BYTES)
        except (OSError, ValueError) as error:
            os.close(file)
            raise OSError(f"{path} is not a page for {places} workers: {error}") from None
        super().__init__(memoryview(self._page).cast("Q"), _PageLock(file), place=place, places=places)
