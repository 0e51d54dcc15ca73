"""Removes the records of jobs that the pool no longer knows from its store.

The pool keeps the newest finished jobs and the last job of each name (`coordination/pool/state.py`: `KEPT_JOBS`). Their
records stay next to the records of running jobs. Events files belong to the user, and are never removed.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection

from holdfast.control.coordinator.shell import record_key
from holdfast.control.pool.blocking_thread import run_in_thread
from holdfast.control.store.interface import Store, StoreError

#: seconds between two sweeps
SWEEP_S = 5.0
#: key of the record of a pool's job: NAME/SUBMISSION. Other servers may keep their records in the same store.
_OF_A_POOL = re.compile(re.escape(record_key("NAME/1")).replace("NAME", "[^/]+").replace("1", "[0-9]+"))

_log = logging.getLogger("holdfast.pool")


def job_key(name: str, submission: int) -> str:
    """Return the key of the record of a pool's job."""
    return record_key(f"{name}/{submission}")


class RecordSweeper:
    """Removes the leftover records of one pool.

    Args:
        store: of the pool.
        known: returns the keys of the jobs that the pool knows.
        used: returns the keys that a coordinator may still write to.
    """

    def __init__(
        self, store: Store, *, known: Callable[[], Collection[str]], used: Callable[[], Collection[str]]
    ) -> None:
        self._store = store
        self._known = known
        self._used = used
        #: keys in the store that may have to be removed, or None before the first sweep
        self._present: set[str] | None = None

    async def run(self) -> None:
        """Sweep every `SWEEP_S`, forever. If the store does not answer, log it and try again at the next time."""
        while True:
            try:
                await self.sweep()
            except StoreError as error:
                _log.info("the records of finished jobs will be removed later: %s", error)
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> None:
        """Remove the records of jobs that the pool has forgotten and no coordinator uses.

        The first call lists the store; later ones only consider the records found there and jobs that the pool has
        known since.

        Raises:
            StoreError: the store does not answer. The next sweep removes the remaining records.
        """
        if self._present is None:
            self._present = set(await run_in_thread(lambda: self._store.list("jobs/").entries))
        # read only after the listing, so that every listed job was known to the pool before
        known = set(self._known())
        leftover = {key for key in self._present - known if _OF_A_POOL.fullmatch(key)} - set(self._used())
        self._present |= known
        for key in sorted(leftover):
            await run_in_thread(lambda key=key: self._remove(key))
            self._present.discard(key)

    def _remove(self, key: str) -> None:
        """Remove a record and log it, unless it is gone or changes meanwhile."""
        entry = self._store.get(key)
        if entry is not None and self._store.remove(key, entry.revision):
            _log.info("%s is removed: the pool has forgotten the job", key)
