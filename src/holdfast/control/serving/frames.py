"""A fast parser for the WebSocket data that agents send: frame boundaries, and whole short messages.

A general parser takes longer for a heartbeat than all other work on it. With thousands of nodes, heartbeats are most of
the inbound data.
"""

from __future__ import annotations

#: first byte of a frame with a whole binary message, without extensions
_WHOLE_BINARY = 0x82
_MASKED = 0x80
_SHORT = 125
#: bytes before the payload of a short frame: two of the head, four of the mask
_BEFORE = 6
#: sizes of the read buffer
SMALL_BYTES = 1 << 12
LARGE_BYTES = 1 << 18


def decode_short_frame(data: bytes) -> bytes | None:
    """Return the unmasked message if the data is exactly one binary frame of a client, with 1 to 125 bytes.

    Otherwise None.
    """
    size = len(data) - _BEFORE
    if not 0 < size <= _SHORT or data[0] != _WHOLE_BINARY or data[1] != _MASKED | size:
        return None
    mask = (data[2:_BEFORE] * (size // 4 + 1))[:size]
    return (int.from_bytes(data[_BEFORE:], "big") ^ int.from_bytes(mask, "big")).to_bytes(size, "big")


class ReadBuffer:
    """The buffer into which a connection is read: small, because most data is, and large while more data follows."""

    def __init__(self) -> None:
        self.room = memoryview(bytearray(SMALL_BYTES))

    def get_data(self, count: int) -> bytes:
        """Return the first `count` bytes of the buffer, which were read.

        Replace the buffer by a large one if it was full, or by a small one if little was read.
        """
        data, size = bytes(self.room[:count]), len(self.room)
        if count == size < LARGE_BYTES:
            self.room = memoryview(bytearray(LARGE_BYTES))
        elif count < SMALL_BYTES < size:
            self.room = memoryview(bytearray(SMALL_BYTES))
        return data


class FrameTracker:
    """Tracks where frames end, whatever they contain."""

    def __init__(self) -> None:
        self._head: bytes = b""
        self._left = 0

    @property
    def is_between_frames(self) -> bool:
        """Whether the next byte begins a frame."""
        return not (self._left or self._head)

    def process(self, data: bytes) -> None:
        """Follow received bytes, to know where frames end.

        The beginning of an incomplete frame head is kept for the next call.
        """
        data, at = bytes(self._head + data), self._left
        while at < len(data):
            size = _frame_size(data, at)
            if size is None:
                self._head, self._left = data[at:], 0
                return
            at += size
        self._head, self._left = b"", at - len(data)


def _frame_size(data: bytes, at: int) -> int | None:
    """Return the bytes of the whole frame that begins at `at`, with its head, or None if the head is incomplete."""
    have = len(data) - at
    if have < 2:
        return None
    size = data[at + 1] & 0x7F
    before = 2 + {126: 2, 127: 8}.get(size, 0)
    if have < before:
        return None
    masked = 4 * (data[at + 1] >> 7)
    return before + masked + (size if before == 2 else int.from_bytes(data[at + 2 : at + before], "big"))
