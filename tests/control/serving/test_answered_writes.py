"""A caller waits for its write as long as the store answers, even behind many other writes."""

from __future__ import annotations

import asyncio
import threading

from holdfast.control.serving.retrying_writer import RetryingWriter, wait_while_answered

LIMIT_S = 0.001


def test_a_caller_waits_while_the_store_answers_earlier_writes() -> None:
    """A job submission behind a thousand joining nodes must not fail with "the store did not answer"."""

    async def wait() -> bool:
        work = asyncio.get_running_loop().create_future()
        asked = 0

        def unanswered_s() -> float:
            nonlocal asked
            asked += 1
            if asked == 20:  # This is long after the limit, and each earlier write was answered within half of it.
                work.set_result(None)
            return LIMIT_S / 2

        return await wait_while_answered(work, unanswered_s, LIMIT_S)

    assert asyncio.run(wait())


def test_an_unanswered_write_times_out() -> None:
    async def wait() -> bool:
        work = asyncio.get_running_loop().create_future()
        return await wait_while_answered(work, lambda: LIMIT_S, LIMIT_S)

    assert not asyncio.run(wait())


def test_a_write_counts_as_unanswered_until_it_completes() -> None:
    async def make() -> list[float]:
        clock = iter([10.0, 13.0])
        writer = RetryingWriter(lambda: next(clock), lambda away_s: None)
        begun, goes_on = threading.Event(), threading.Event()
        seen = [writer.unanswered_s]

        def write() -> None:
            begun.set()
            goes_on.wait()

        making = asyncio.ensure_future(writer.write(write))
        await asyncio.to_thread(begun.wait)
        seen.append(writer.unanswered_s)
        goes_on.set()
        await making
        return [*seen, writer.unanswered_s]

    assert asyncio.run(make()) == [0.0, 3.0, 0.0]
