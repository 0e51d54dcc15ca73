"""What jobs leave in the pool's store: the record of one that the pool knows no more is removed.

The pool keeps the newest jobs that are over, of each name the last one (`coordination/pool/state.py`: `KEPT_JOBS`), and
so many records lie beside those of the jobs that go on. Events are files, and are left to their owner.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection

from holdfast.control.coordinator.shell import record_key
from holdfast.control.pool.beside import in_a_thread
from holdfast.control.store.interface import Store, StoreError

#: how often it is looked whether the pool has forgotten a job
SWEEP_S = 5.0
#: a job of a pool: NAME/SUBMISSION (others may keep their records in the same store)
_OF_A_POOL = re.compile(re.escape(record_key("NAME/1")).replace("NAME", "[^/]+").replace("1", "[0-9]+"))

_log = logging.getLogger("holdfast.pool")


def job_key(name: str, submission: int) -> str:
    """Return under which key the record of a pool's job lies."""
    return record_key(f"{name}/{submission}")


class Leftovers:
    """Of one pool.

    Args:
        known: returns the keys of the jobs that the pool knows. used: those that a coordinator may still write to.
    """

    def __init__(
        self, store: Store, *, known: Callable[[], Collection[str]], used: Callable[[], Collection[str]]
    ) -> None:
        self._store = store
        self._known = known
        self._used = used
        #: what may have to be removed; None: nobody has looked yet what there is
        self._there: set[str] | None = None

    async def tidy(self) -> None:
        """Remove what is left of jobs, now and whenever the pool has forgotten one, for ever."""
        while True:
            try:
                await self.sweep()
            except StoreError as error:
                _log.info("what is left of jobs that are over is removed later: %s", error)
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> None:
        """Remove what is left now.

        Raises:
            StoreError: the store does not answer; what was not removed is next time.
        """
        if self._there is None:
            self._there = set(await in_a_thread(lambda: self._store.list("jobs/").entries))
        # (only now: whatever lies there belongs to a job that the pool knew before)
        known = set(self._known())
        gone = {key for key in self._there - known if _OF_A_POOL.fullmatch(key)} - set(self._used())
        self._there |= known
        for key in sorted(gone):
            await in_a_thread(lambda key=key: self._remove(key))
            self._there.discard(key)

    def _remove(self, key: str) -> None:
        entry = self._store.get(key)
        if entry is not None and self._store.remove(key, entry.revision):
            _log.info("%s is removed: the pool has forgotten the job", key)
