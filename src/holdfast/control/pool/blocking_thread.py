"""Blocking work of any duration in its own thread. Neither other work nor the end of the process waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a new thread, and return its result, or raise its error.

    If the caller is cancelled, the work runs on alone.

    asyncio's own threads are few, the store needs them for its writes, and a process ends only once they all have
    ended.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(put: Callable[[], None]) -> None:
        if not done.done():
            put()

    def run() -> None:
        """Do the work, and pass its result or error to the event loop, unless that has ended."""
        try:
            put = partial(done.set_result, work())
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            put = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(finish, put)

    threading.Thread(target=run, daemon=True).start()
    return await done
