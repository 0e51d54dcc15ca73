"""What an agent says again fits into Hello as far as there is room; the rest follows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from holdfast.protocol.messages.agent import AgentMessage, AppliedSteps, FromWorker, Kept, WorkerDown

#: of a message of a megabyte, this much is left to Hello's other fields
_HELLO_BYTES = (1 << 20) - (1 << 14)


def fitting(
    messages: Iterator[Kept],
) -> tuple[tuple[Kept, ...], Kept | None]:
    """Take from `messages` what fits into Hello, one page of steps at most; also return what was taken too much."""
    kept: list[Kept] = []
    room, pages = _HELLO_BYTES, 1
    for message in messages:
        pages -= isinstance(message, AppliedSteps)
        room -= len(msgspec.msgpack.encode(message)) + 8
        if room < 0 or pages < 0:
            return tuple(kept), message
        kept.append(message)
    return tuple(kept), None


def envelopes(messages: Iterable[Kept]) -> Iterator[AgentMessage]:
    """Yield what is said instead of Hello, for what did not fit into it."""
    for message in messages:
        yield message if isinstance(message, AppliedSteps | WorkerDown) else FromWorker(message=message)
