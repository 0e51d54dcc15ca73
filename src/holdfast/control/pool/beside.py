"""Work that may take any time, in a thread of its own: nobody else waits for it, and neither does the process's end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def in_a_thread(work: Callable[[], T]) -> T:
    """Do blocking work, and return what comes of it; whoever is cancelled leaves it to itself.

    asyncio's own threads are few, writes of the store need them, and a process ends only once each has come to its end.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(put: Callable[[], None]) -> None:
        if not done.done():
            put()

    def run() -> None:
        try:
            put = partial(done.set_result, work())
        except BaseException as error:  # noqa: BLE001 (whoever waits for it raises it)
            put = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # (nobody is there any more)
            loop.call_soon_threadsafe(settle, put)

    threading.Thread(target=run, daemon=True).start()
    return await done
