"""How the places of a unit agree on what they compute: each proposes it, and all go on once all have proposed the same.

Who waits can leave: `withdraw` is atomic with the last proposal, so that either all go or none. Nothing here is a
collective, and nothing is of an earlier unit: each has a page of its own, which begins with zeros. Its words, 64 bits
each, little endian as the machine is:

    word            what
    0               how many agreements there have been
    8 * (1 + place) a place's proposal: number, generation, step, micro-batch, kind

A proposal's number is that of the agreement that it would bring about, one more than there have been: none comes about
without this place, so it stays so while the proposal stands, and all that stand have the same. One store makes it:
that of word 0. So there is no moment at which some have agreed and others have not, wherever a process may be killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from holdfast.protocol.layouts.proposals import Proposal

#: of a place; a cache line, so that who writes holds up nobody who looks
SLOT_WORDS = 8
WORD_BYTES = 8
#: how long a place sleeps between two looks at first, and at last, in seconds
FIRST_SLEEP_S, LAST_SLEEP_S = 50e-6, 1e-3
_LONGER = 1.25
_AGREEMENTS = 0
_WITHDRAWN = 0


class Words(Protocol):
    """Memory that all places see, in words; a word is read and written at once."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


def words_of(places: int) -> int:
    """Return how many words a page for so many places has."""
    return SLOT_WORDS * (1 + places)


class ProposalTable:
    """One place's view of the proposals of its unit; for one thread.

    Args:
        words: the page. lock: shuts out all other places for as long as it is held; a dead one's is free.
        sleep: returns after so many seconds.
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
        self._mine = self._slots[place]
        #: of the proposal that stands; 0: none does
        self._number = 0

    def agree(self, proposal: Proposal, still_wanted: Callable[[], bool]) -> bool:
        """Wait until all places have proposed this; False: it was not wanted any more first, and none of them goes.

        Args:
            still_wanted: asked again and again while others are waited for.
        """
        agreed, sleep_s = self.propose(proposal), FIRST_SLEEP_S
        while not agreed:
            if not still_wanted():
                return not self.withdraw()
            self._sleep(sleep_s)
            sleep_s = min(sleep_s * _LONGER, LAST_SLEEP_S)
            agreed = self.agreed()
        return True

    def propose(self, proposal: Proposal) -> bool:
        """Propose this; True where it was the last one that was missing, and all go.

        Raises:
            RuntimeError: another proposal of this place stands.
        """
        if self._number:
            raise RuntimeError(f"broken invariant: {proposal} is proposed while another proposal stands")
        words = self._words
        with self._lock:
            number = words[_AGREEMENTS] + 1
            for offset, value in enumerate(proposal, start=1):
                words[self._mine + offset] = value
            words[self._mine] = self._number = number
            if all(self._says(slot, number, proposal) for slot in self._slots):
                words[_AGREEMENTS] = number
        return self.agreed()

    def agreed(self) -> bool:
        """Tell whether all have proposed what this place has: then its proposal is over, and it goes."""
        if self._words[_AGREEMENTS] < self._number:
            return False
        self._number = 0
        return True

    def withdraw(self) -> bool:
        """Take the proposal back; False where all have agreed meanwhile, and this place goes as well."""
        with self._lock:
            if self.agreed():
                return False
            self._words[self._mine] = _WITHDRAWN
        self._number = 0
        return True

    def _says(self, slot: int, number: int, proposal: Proposal) -> bool:
        words = self._words
        return words[slot] == number and all(words[slot + 1 + i] == value for i, value in enumerate(proposal))
