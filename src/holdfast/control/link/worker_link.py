"""A worker process's end of the Unix socket to its agent."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import traceback
from collections.abc import Callable

from holdfast.control.link.framing import FrameDecoder, FrameError, FromWorkerProcess, ToWorkerProcess, encode_frame
from holdfast.protocol.layouts.group_messages import UnitAnswer
from holdfast.protocol.messages.orders import Order
from holdfast.protocol.names import MAX_WHOLE_BYTES

_SEND_BUFFER = 4 << 20
_RECEIVE_BYTES = 1 << 16


class WorkerLink:
    """Sends a worker's messages to its agent, and passes the coordinator's orders to a callback.

    `send` may be called from any thread. It waits for the agent only if megabytes lie unread, which a healthy agent
    never allows.
    """

    def __init__(self, socket_path: str) -> None:
        """Connect.

        Raises:
            OSError: no agent listens at this path.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            self._socket.connect(socket_path)
        except OSError:
            self._socket.close()
            raise
        self._lock = threading.Lock()
        self._closed = False
        self._listener: threading.Thread | None = None
        self._on_order: Callable[[Order], None] = _ignore_message
        self._on_unit: Callable[[UnitAnswer], None] = _ignore_message
        self._on_lost: Callable[[], None] = _ignore_loss
        self._lost = False

    @property
    def agent_pid(self) -> int:
        """The process id of the agent, as the kernel knows it."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[:4], sys.byteorder)

    def send(self, message: FromWorkerProcess) -> None:
        """Send one message, in the order of the calls. If the agent is gone, do nothing: `on_lost` reports it.

        Raises:
            FrameError: the message is too large.
        """
        frame = encode_frame(message)
        with self._lock:
            try:
                self._socket.sendall(frame)
            except OSError:
                # The agent is gone. The listener sees the end of the stream, and reports it once, in one place.
                return

    def start(self, on_order: Callable[[Order], None], on_lost: Callable[[], None]) -> None:
        """Start a daemon thread that calls `on_order` for each order, and `on_lost` once when the agent is gone.

        If `listen_for_unit` has started the thread, the callbacks replace the earlier ones. If the agent is gone
        already, call `on_lost` now.
        """
        self._on_order = on_order
        self._listen(on_lost)

    def listen_for_unit(self, on_unit: Callable[[UnitAnswer], None], on_lost: Callable[[], None]) -> None:
        """Listen as `start` does, before there are any orders.

        Call `on_unit` for each answer about this worker's replica group.
        """
        self._on_unit = on_unit
        self._listen(on_lost)

    def close(self) -> None:
        """End the link from this side, and wait until the listening thread has ended. `on_lost` is not called."""
        self._closed = True
        with contextlib.suppress(OSError):  # the agent closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._listener is not None and self._listener is not threading.current_thread():
            self._listener.join()
        self._socket.close()

    def _listen(self, on_lost: Callable[[], None]) -> None:
        """Set the callback for the loss of the agent, and start the thread unless it runs.

        If the agent is lost already, call it now.
        """
        with self._lock:
            self._on_lost, lost = on_lost, self._lost
            if self._listener is None:
                self._listener = threading.Thread(target=self._run, name="holdfast-link", daemon=True)
                self._listener.start()
        if lost:
            on_lost()

    def _run(self) -> None:
        """Receive until the connection ends, then call `on_lost` unless `close` has ended it.

        Print an error of the stream or of a callback.
        """
        try:
            self._receive()
        except FrameError as error:
            print(f"holdfast: the agent's connection is broken: {error}", file=sys.stderr, flush=True)
        except BaseException:
            # A worker that no longer receives orders must not live on in silence.
            traceback.print_exc()
            raise
        finally:
            with self._lock:
                self._lost, on_lost = not self._closed, self._on_lost
            if self._lost:
                on_lost()

    def _receive(self) -> None:
        """Pass each answer about the replica group to `on_unit`, and each order to `on_order`, until the socket ends.

        Raises:
            FrameError: the bytes are not a valid message.
        """
        decoder: FrameDecoder[ToWorkerProcess] = FrameDecoder(ToWorkerProcess, MAX_WHOLE_BYTES)
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except OSError:
                return
            if not data:
                return
            for message in decoder.feed(data):
                if isinstance(message, UnitAnswer):
                    self._on_unit(message)
                else:
                    self._on_order(message)


def _ignore_message(message: Order | UnitAnswer) -> None:
    """Drop a message that arrives before its callback is set."""


def _ignore_loss() -> None:
    """Do nothing if the agent is lost before a callback is set."""
