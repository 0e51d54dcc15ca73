"""A process with a silent network; it runs separately, because all of its sockets are affected."""

from __future__ import annotations

import multiprocessing
import select
import socket
from multiprocessing.connection import Connection

import pytest

from holdfast.control.link.silenced_network import block_incoming_tcp

_context = multiprocessing.get_context("fork")
#: Timeout for data that must arrive.
DEADLINE_S = 30.0


def _listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def _live(address: tuple[str, int], pipe: Connection) -> None:
    with _listener() as listener, socket.create_connection(address) as connection:
        assert connection.recv(5) == b"hello"
        pipe.send((listener.getsockname(), block_incoming_tcp()))
        pipe.recv()
        pipe.send(select.select([connection, listener], [], [], 0.0)[0] == [])
        pipe.recv()


def test_a_silenced_process_receives_no_data_and_its_peers_see_no_close() -> None:
    here, there = _context.Pipe()
    with _listener() as listener:
        process = _context.Process(target=_live, args=(listener.getsockname(), there))
        process.start()
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"hello")
            assert here.poll(DEADLINE_S)
            address, sockets = here.recv()
            assert sockets >= 2
            connection.sendall(b"more")  # On the loopback interface, the data has arrived when this call returns.
            with pytest.raises(TimeoutError):
                socket.create_connection(address, timeout=0.2)
            here.send("look")
            assert here.poll(DEADLINE_S)
            assert here.recv() is True
            assert select.select([connection], [], [], 0.0)[0] == [], (
                "the end of the connection must not be visible either"
            )
            here.send("end")
            process.join()
    assert process.exitcode == 0
