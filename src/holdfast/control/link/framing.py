"""Frames on Unix sockets: a 4-byte big-endian length, then one MessagePack message of bounded size."""

from __future__ import annotations

import struct
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from holdfast.protocol.checkpoints.names import FileName
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.layouts.group_messages import UnitAnswer, UnitWord
from holdfast.protocol.messages.orders import Order
from holdfast.protocol.messages.worker import MAX_CHECKPOINT_PARTS, MAX_PART_FILES, ScriptError, WorkerMessage
from holdfast.protocol.names import MALFORMED, MAX_MESSAGE_BYTES, Count, Seconds, Text, WorkerId

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


class FrameError(ValueError):
    """The bytes from a socket are not a valid message. The connection must be closed."""


class Crashed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reason why a worker process ends.

    Only its agent gets it, and adds it to the report of the exit (`WorkerDown`).
    """

    worker: WorkerId
    kind: FailureKind
    detail: Text
    exit_code: int
    final: bool = False
    error: ScriptError | None = None


class PartHanded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker has put its part of a checkpoint into the spool folder.

    The agent writes it to the checkpoint storage.
    """

    worker: WorkerId
    #: folder name of the checkpoint
    name: Text
    files: Annotated[tuple[FileName, ...], Meta(max_length=MAX_PART_FILES)]
    #: number of this part, of `parts`
    part: Count = 0
    parts: Annotated[int, Meta(ge=1, le=MAX_CHECKPOINT_PARTS)] = 1
    #: seconds for which the worker did not train while it saved
    stall_s: Seconds = 0.0


#: messages from a worker process to its agent
FromWorkerProcess = WorkerMessage | UnitWord | Crashed | PartHanded
#: messages from an agent to its worker process
ToWorkerProcess = Order | UnitAnswer


def encode_frame(message: msgspec.Struct, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Return a message as one frame: its length, then the message in MessagePack.

    Raises:
        FrameError: the message is larger than `max_bytes`.
    """
    payload = _encoder.encode(message)
    if len(payload) > max_bytes:
        raise FrameError(
            f"a {type(message).__name__} of {len(payload)} bytes is too large: at most {max_bytes} are allowed"
        )
    return _LENGTH.pack(len(payload)) + payload


class FrameDecoder(Generic[T]):
    """Cuts a byte stream into messages of one type, which may be a union. After an error the stream is unusable."""

    def __init__(self, kind: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Add received bytes, and return the messages that are now complete.

        Keep an incomplete frame for the next call.

        Raises:
            FrameError: a frame is too long, or is not a message of the expected type.
        """
        self._buffer += data
        messages: list[T] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > self._max_bytes:
                raise FrameError(f"a frame of {size} bytes: at most {self._max_bytes} are allowed")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            messages.append(self._decode(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return messages

    def _decode(self, payload: bytes) -> T:
        """Return the message in a frame.

        Raises:
            FrameError: it is not a message of the expected type.
        """
        try:
            return self._decoder.decode(payload)
        except MALFORMED as error:
            raise FrameError(f"not a message: {error}") from error
