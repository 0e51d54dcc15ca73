"""Messages between a worker and one of its loader workers, over a private socket pair."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType
from typing import Any

from holdfast.errors import TracebackElsewhereError
from holdfast.runtime.data.parcels import pack, unpack

_MESSAGE = struct.Struct("<BQ")
_DESCRIPTOR = struct.Struct("@i")


class MessageKind(IntEnum):
    """The kind of a message. To a loader worker: SET_UP, FETCHER, FETCH, DROP; from it: UP, DONE, FAILED."""

    SET_UP = 1  # a LoaderSetting
    FETCHER = 2  # the function that makes micro-batches
    FETCH = 3  # step, micro-batch, and the argument of the fetch function; the answer has the same number
    DROP = 4  # the request with this number is cancelled
    UP = 5  # ready to fetch micro-batches
    DONE = 6  # the micro-batch
    FAILED = 7  # an exception with its traceback; number 0 if the set-up failed


@dataclass(frozen=True, slots=True)
class Message:
    """One message between the training process and a loader worker."""

    kind: MessageKind
    number: int
    #: a descriptor that the receiver must close; -1 if the message has no parcel
    parcel: int

    def unpack(self, main: Callable[[], ModuleType] | None = None) -> Any:
        """Return the content of the parcel, and close the parcel in any case.

        Args:
            main: returns the script's module, see `parcels.unpack`; None: this process's `__main__`.

        Raises:
            Exception: an exception of unpickling.
        """
        try:
            return unpack(self.parcel) if main is None else unpack(self.parcel, main)
        finally:
            self.close()

    def close(self) -> None:
        """Close the parcel, if the message has one."""
        if self.parcel >= 0:
            os.close(self.parcel)


class ChannelEnd:
    """One end of a channel. Messages have a few bytes, so sending does not block while few of them are unread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Return the descriptor, to wait for messages."""
        return self._end.fileno()

    def send(self, kind: MessageKind, number: int = 0, parcel: int = -1) -> bool:
        """Send a message, with a descriptor if `parcel` is not -1; the sender keeps its own. Return False if the other
        end is gone.
        """
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._end, [_MESSAGE.pack(kind, number)], [] if parcel < 0 else [parcel])
            return True
        return False

    def send_packed(self, kind: MessageKind, number: int, value: object) -> bool:
        """Send a message with a pickled object as its parcel. Return False if the other end is gone.

        Raises:
            Exception: an exception of pickling.
        """
        parcel = pack(value)
        try:
            return self.send(kind, number, parcel)
        finally:
            os.close(parcel)

    def receive(self, *, wait: bool) -> Message | None:
        """Return the next message.

        Args:
            wait: block until there is one; else return None if none has arrived.

        Raises:
            EOFError: the other end is gone.
        """
        try:
            # socket.recv_fds ignores its flags.
            flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
            data, beside, _, _ = self._end.recvmsg(_MESSAGE.size, socket.CMSG_LEN(_DESCRIPTOR.size), flags)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data, beside = b"", []
        if not data:
            raise EOFError
        kind, number = _MESSAGE.unpack(data)
        parcels = [_DESCRIPTOR.unpack_from(given)[0] for _, _, given in beside]
        return Message(MessageKind(kind), number, parcels[0] if parcels else -1)

    def close(self) -> None:
        """Close this end."""
        self._end.close()


#: a picklable exception, the place that raised it, its traceback, and file and line of each frame
PackedException = tuple[BaseException, str, str, tuple[tuple[str, int], ...]]


class LoaderTracebackError(TracebackElsewhereError):
    """The traceback in a loader worker, as the cause of the same exception in the worker."""

    def __init__(self, where: str, story: str, frames: tuple[tuple[str, int], ...] = ()) -> None:
        super().__init__(where, story)
        self.frames = frames

    def __str__(self) -> str:
        where, story = self.args
        return f'in {where}:\n"""\n{story}"""'


def pack_exception(error: BaseException, where: str) -> PackedException:
    """Return a picklable tuple of an exception, `where` it was raised, its traceback as text, and its frames. An
    exception that cannot be pickled is replaced by a RuntimeError with its text.

    The traceback is removed from the returned exception, even if that is `error` itself.
    """
    story = "".join(traceback.format_exception(error))
    frames = tuple((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - the exception's class may raise anything
        error = RuntimeError("".join(traceback.format_exception_only(error)).strip())
    error.__traceback__ = None
    return error, where, story, frames


def unpack_exception(failure: PackedException) -> BaseException:
    """Return the exception of a failure; its cause is a LoaderTracebackError with the original traceback."""
    error, where, story, frames = failure
    error.__cause__ = LoaderTracebackError(where, story, frames)
    return error
