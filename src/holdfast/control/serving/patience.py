"""What a shell does while its store is away: it waits with the write that it is at, and says so.

The turn stays under way, so nothing is decided and nobody is told anything; agents and workers need neither to go on.
The write is made again until it is answered: the store finds out whether an earlier try came through.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from holdfast.control.store.interface import StoreAwayError
from holdfast.errors import RefusedError

#: seconds between two tries
AGAIN_S = 0.5

_log = logging.getLogger("holdfast.store")


class PatientWriter:
    """Makes writes of a store, one at a time, and again where the store was away.

    Args:
        now: the time, in unix seconds that never step back. on_back: called once it answers again, with the seconds for
            which it was away.
    """

    def __init__(self, now: Callable[[], float], on_back: Callable[[float], None]) -> None:
        self._now = now
        self._on_back = on_back
        self._given_up = asyncio.Event()
        self._away_since: float | None = None
        self._why = ""
        #: when the write at hand was begun
        self._begun: float | None = None

    async def make(self, write: Callable[[], None]) -> None:
        """Make a write in a thread, and return once it is made.

        Raises:
            StoreAwayError: the store is away, and nobody waits for it any more.
            SupersededError, JournalError, StoreError: as the write raises them.
        """
        self._begun = self._now()
        try:
            await self._make(write)
        finally:
            self._begun = None

    @property
    def unanswered_s(self) -> float:
        """For how long the store has not answered the write at hand, in seconds; 0: none is at hand."""
        return 0.0 if self._begun is None else self._now() - self._begun

    async def _make(self, write: Callable[[], None]) -> None:
        while True:
            try:
                await asyncio.to_thread(write)
            except StoreAwayError as error:
                self._missed(error)
                if self._given_up.is_set():
                    raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._given_up.wait(), AGAIN_S)
            else:
                self._back()
                return

    def give_up(self) -> None:
        """Wait for the store no longer: a write that finds it away fails."""
        self._given_up.set()

    def check(self) -> None:
        """Refuse what would have to wait for the store.

        Raises:
            RefusedError: it is away; with since when, and what goes on without it.
        """
        if self._away_since is not None:
            raise RefusedError(
                f"the store has been away for {self._now() - self._away_since:.0f} s, and nothing is decided until it "
                f"answers (training goes on): {self._why}"
            )

    def _missed(self, error: StoreAwayError) -> None:
        self._why = str(error)
        if self._away_since is None:
            self._away_since = self._now()
            _log.warning("nothing is decided until the store answers, training goes on: %s", error)

    def _back(self) -> None:
        if self._away_since is not None:
            away_s, self._away_since = self._now() - self._away_since, None
            _log.warning("the store answers again, after %.1f s without a decision", away_s)
            self._on_back(away_s)


async def done_while_answered(work: asyncio.Future[Any], unanswered_s: Callable[[], float], limit_s: float) -> bool:
    """Wait for what waits for writes, its own and those before it, for as long as the store answers.

    Returns:
        Whether it is done; False: a write has not been answered for `limit_s`.
    """
    while not work.done():
        left_s = limit_s - unanswered_s()
        if left_s <= 0.0:
            return False
        await asyncio.wait((work,), timeout=left_s)
    return True
