"""What comes over a WebSocket, frame by frame: where each ends, and the short ones read at once.

A general parser takes longer for a heartbeat than all that is done about it, and of thousands of nodes heartbeats are
most of what comes.
"""

from __future__ import annotations

#: a whole message, of bytes, with nothing that was agreed upon beside
_WHOLE_BINARY = 0x82
_MASKED = 0x80
_SHORT = 125
#: before the bytes of a short frame: two of the head, four of the mask
_BEFORE = 6
#: what is read at once
LITTLE_BYTES, MUCH_BYTES = 1 << 12, 1 << 18


def short_message(data: bytes) -> bytes | None:
    """Return the message where these bytes are one short frame of a client, and no more; None for all else."""
    size = len(data) - _BEFORE
    if not 0 < size <= _SHORT or data[0] != _WHOLE_BINARY or data[1] != _MASKED | size:
        return None
    mask = (data[2:_BEFORE] * (size // 4 + 1))[:size]
    return (int.from_bytes(data[_BEFORE:], "big") ^ int.from_bytes(mask, "big")).to_bytes(size, "big")


class ReadBuffer:
    """Where a connection is read into: a little, as most of what comes is; much, while there is more."""

    def __init__(self) -> None:
        self.room = memoryview(bytearray(LITTLE_BYTES))

    def take(self, count: int) -> bytes:
        """Return what was read: the first `count` bytes of the room."""
        data, size = bytes(self.room[:count]), len(self.room)
        if count == size < MUCH_BYTES:
            self.room = memoryview(bytearray(MUCH_BYTES))
        elif count < LITTLE_BYTES < size:
            self.room = memoryview(bytearray(LITTLE_BYTES))
        return data


class FrameEnds:
    """Follows where frames end, whatever they hold."""

    def __init__(self) -> None:
        self._head: bytes = b""
        self._left = 0

    @property
    def between(self) -> bool:
        """Whether the next byte begins a frame."""
        return not (self._left or self._head)

    def take(self, data: bytes) -> None:
        """Take in what has come."""
        data, at = bytes(self._head + data), self._left
        while at < len(data):
            size = _size(data, at)
            if size is None:
                self._head, self._left = data[at:], 0
                return
            at += size
        self._head, self._left = b"", at - len(data)


def _size(data: bytes, at: int) -> int | None:
    """Return how long the frame is that begins there; None where that is not known yet."""
    have = len(data) - at
    if have < 2:
        return None
    size = data[at + 1] & 0x7F
    before = 2 + {126: 2, 127: 8}.get(size, 0)
    if have < before:
        return None
    masked = 4 * (data[at + 1] >> 7)
    return before + masked + (size if before == 2 else int.from_bytes(data[at + 2 : at + before], "big"))
