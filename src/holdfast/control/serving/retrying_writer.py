"""Retries writes while the store is unavailable.

The transaction stays open meanwhile, so nothing is decided and no message is sent. Agents and workers continue without
either. The write is repeated until it is answered. The store finds out whether an earlier attempt succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from holdfast.control.store.interface import StoreAwayError
from holdfast.errors import RefusedError

#: seconds between two attempts
AGAIN_S = 0.5

_log = logging.getLogger("holdfast.store")


class RetryingWriter:
    """Makes writes to a store, one at a time, and repeats them while the store is unavailable.

    Args:
        now: the time, in unix seconds that never step back.
        on_back: called once the store answers again, with the seconds for which it was unavailable.
    """

    def __init__(self, now: Callable[[], float], on_back: Callable[[float], None]) -> None:
        self._now = now
        self._on_back = on_back
        self._given_up = asyncio.Event()
        self._away_since: float | None = None
        self._why = ""
        #: time at which the current write was begun, or None without one
        self._begun: float | None = None

    async def write(self, write: Callable[[], None]) -> None:
        """Make a write in a thread, and return once it has succeeded.

        While the store is unavailable, repeat it every `AGAIN_S`.

        Raises:
            StoreAwayError: the store is unavailable, and `give_up` was called.
            SupersededError, JournalError, StoreError: as the write raises them.
        """
        self._begun = self._now()
        try:
            await self._write_until_answered(write)
        finally:
            self._begun = None

    @property
    def unanswered_s(self) -> float:
        """Seconds for which the store has not answered the current write, or 0 without one."""
        return 0.0 if self._begun is None else self._now() - self._begun

    async def _write_until_answered(self, write: Callable[[], None]) -> None:
        """Repeat a write until the store answers. After `give_up`, raise the error of an unavailable store."""
        while True:
            try:
                await asyncio.to_thread(write)
            except StoreAwayError as error:
                self._on_unavailable(error)
                if self._given_up.is_set():
                    raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._given_up.wait(), AGAIN_S)
            else:
                self._on_answer()
                return

    def give_up(self) -> None:
        """Stop waiting for the store: a write that finds it unavailable fails."""
        self._given_up.set()

    def check_available(self) -> None:
        """Refuse a request if the last write has found the store unavailable, because it would have to wait.

        Raises:
            RefusedError: the store is unavailable; the message says since when, and what goes on without it.
        """
        if self._away_since is not None:
            away_s = self._now() - self._away_since
            raise RefusedError(
                f"the store has been unavailable for {away_s:.0f} s, and nothing is decided until it answers; "
                f"training goes on: {self._why}"
            )

    def _on_unavailable(self, error: StoreAwayError) -> None:
        """Note since when and why the store is unavailable. Log the first failure."""
        self._why = str(error)
        if self._away_since is None:
            self._away_since = self._now()
            _log.warning("nothing is decided until the store answers, training goes on: %s", error)

    def _on_answer(self) -> None:
        """If the store was unavailable, log that it answers again, and call `on_back` with the seconds."""
        if self._away_since is not None:
            away_s, self._away_since = self._now() - self._away_since, None
            _log.warning("the store answers again, after %.1f s without a decision", away_s)
            self._on_back(away_s)


async def wait_while_answered(work: asyncio.Future[Any], unanswered_s: Callable[[], float], limit_s: float) -> bool:
    """Wait for work that needs writes, and give up once the store has not answered a write for `limit_s`.

    Args:
        work: the work, which waits for its own writes and for earlier ones.
        unanswered_s: returns the seconds for which the store has not answered the current write.
        limit_s: limit on these seconds.

    Returns:
        Whether the work is done. False if a write has not been answered for `limit_s`.
    """
    while not work.done():
        left_s = limit_s - unanswered_s()
        if left_s <= 0.0:
            return False
        await asyncio.wait((work,), timeout=left_s)
    return True
