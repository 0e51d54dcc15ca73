"""How the workers of a replica group agree on their next work.

Each worker proposes it, and all start once all proposals are the same. A waiting worker can leave: `withdraw` is atomic
with the last proposal, so either all start or none. The proposals are not a collective, and each group begins with a
new page of zeros. Its words have 64 bits, little endian as the machine:

word            content
0               number of agreements so far
8 * (1 + place) the proposal of one worker: number, generation, step, micro-batch, kind

The number of a proposal is the number of the agreement that it would complete, one more than there are. No agreement
completes without this worker, so the number stays valid while the proposal stands, and all standing proposals have the
same one. One store completes the agreement: the store to word 0. So it is complete for all workers or for none,
whenever a process is killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from holdfast.protocol.layouts.proposals import Proposal

#: words of one worker: a cache line, so that a writer does not slow down the readers
SLOT_WORDS = 8
WORD_BYTES = 8
#: seconds that a worker sleeps between two checks, at first and at most
FIRST_SLEEP_S, LAST_SLEEP_S = 50e-6, 1e-3
_LONGER = 1.25
_AGREEMENTS = 0
_WITHDRAWN = 0


class Words(Protocol):
    """Memory that all workers of the group share, as words. Each word is read and written atomically."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


def count_words(places: int) -> int:
    """Return the number of words of a page for this many workers."""
    return SLOT_WORDS * (1 + places)


class ProposalTable:
    """One worker's view of the proposals of its group, for one thread.

    Args:
        words: the page.
        lock: excludes all other workers while it is held; the lock of a dead worker is free.
        place: rank of this worker in the group.
        places: size of the group.
        sleep: returns after this many seconds.
    """

    def __init__(
        self,
        words: Words,
        lock: AbstractContextManager[object],
        *,
        place: int,
        places: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._words, self._lock, self._sleep = words, lock, sleep
        self._slots = [SLOT_WORDS * (1 + number) for number in range(places)]
        self._own_slot = self._slots[place]
        #: number of the standing proposal, or 0 without one
        self._number = 0

    def agree(self, proposal: Proposal, still_wanted: Callable[[], bool]) -> bool:
        """Propose this worker's next work, wait until all workers of the group have proposed the same, and return True.

        Return False if `still_wanted` returned False first: then no worker starts that work.

        Args:
            still_wanted: called repeatedly while the other workers are missing.

        Raises:
            RuntimeError: another proposal of this worker stands.
        """
        agreed, sleep_s = self.propose(proposal), FIRST_SLEEP_S
        while not agreed:
            if not still_wanted():
                return not self.withdraw()
            self._sleep(sleep_s)
            sleep_s = min(sleep_s * _LONGER, LAST_SLEEP_S)
            agreed = self.check_agreed()
        return True

    def propose(self, proposal: Proposal) -> bool:
        """Propose this worker's next work, and return True if all workers have now proposed the same, and start it.

        Else return False, and the proposal stands until `check_agreed` is True or `withdraw` is called.

        Raises:
            RuntimeError: another proposal of this worker stands.
        """
        if self._number:
            raise RuntimeError(f"broken invariant: {proposal} is proposed while another proposal stands")
        words = self._words
        with self._lock:
            number = words[_AGREEMENTS] + 1
            for offset, value in enumerate(proposal, start=1):
                words[self._own_slot + offset] = value
            words[self._own_slot] = self._number = number
            if all(self._has_proposal(slot, number, proposal) for slot in self._slots):
                words[_AGREEMENTS] = number
        return self.check_agreed()

    def check_agreed(self) -> bool:
        """Return whether all workers have proposed the same work as this one.

        If so, its proposal is over, and it starts that work.
        """
        if self._words[_AGREEMENTS] < self._number:
            return False
        self._number = 0
        return True

    def withdraw(self) -> bool:
        """Withdraw the standing proposal, and return True.

        Return False if all have agreed meanwhile: then this worker starts the proposed work, too.
        """
        with self._lock:
            if self.check_agreed():
                return False
            self._words[self._own_slot] = _WITHDRAWN
        self._number = 0
        return True

    def _has_proposal(self, slot: int, number: int, proposal: Proposal) -> bool:
        words = self._words
        return words[slot] == number and all(words[slot + 1 + i] == value for i, value in enumerate(proposal))
