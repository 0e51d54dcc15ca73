"""Splits the messages that an agent repeats into a part that fits into Hello and a rest that follows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from holdfast.protocol.messages.agent import AgentMessage, AppliedSteps, FromWorker, Kept, WorkerDown

#: the room for repeated messages in a message of one megabyte; the rest is for the other fields of Hello
_HELLO_BYTES = (1 << 20) - (1 << 14)


def split_to_fit(
    messages: Iterator[Kept],
) -> tuple[tuple[Kept, ...], Kept | None]:
    """Return the first messages that fit into Hello, with at most one page of steps, and the first that does not fit,
    or None.

    The rest stays in the iterator.
    """
    kept: list[Kept] = []
    room, pages = _HELLO_BYTES, 1
    for message in messages:
        pages -= isinstance(message, AppliedSteps)
        room -= len(msgspec.msgpack.encode(message)) + 8
        if room < 0 or pages < 0:
            return tuple(kept), message
        kept.append(message)
    return tuple(kept), None


def wrap_messages(messages: Iterable[Kept]) -> Iterator[AgentMessage]:
    """Yield the messages in the form in which they are sent after Hello."""
    for message in messages:
        yield message if isinstance(message, AppliedSteps | WorkerDown) else FromWorker(message=message)
