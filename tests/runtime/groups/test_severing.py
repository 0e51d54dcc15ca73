"""Exactly the group's sockets are found and broken, even if their descriptors are reused."""

import gc
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from holdfast.runtime.groups.severing import GroupSockets, SocketHandle, find_group_sockets, socket_inodes


class Net:
    """A listener and connections to it."""

    def __init__(self, stack: ExitStack, host: str = "127.0.0.1") -> None:
        self._stack = stack
        self.listener = stack.enter_context(socket.create_server((host, 0)))

    @property
    def address(self) -> bytes:
        """Return an address as in a rendezvous blob, with a sockaddr_in somewhere in it."""
        host, port = self.listener.getsockname()
        return b"??" + struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host) + b"??"

    def connection(self) -> tuple[socket.socket, socket.socket]:
        near = self._stack.enter_context(socket.create_connection(self.listener.getsockname()))
        far, _ = self.listener.accept()
        self._stack.enter_context(far)
        for end in (near, far):
            end.settimeout(60)
        return near, far


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def is_open(connection: tuple[socket.socket, socket.socket]) -> bool:
    near, far = connection
    try:
        near.sendall(b"x")
        return far.recv(1) == b"x"
    except OSError:
        return False


def found(sockets: GroupSockets) -> set[int]:
    return {handle.descriptor for handle in sockets.handles}


def test_only_new_connected_sockets_at_exchanged_addresses_are_found(stack: ExitStack):
    group, stranger = Net(stack), Net(stack)
    old = group.connection()
    before = socket_inodes()
    late_listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    unconnected = stack.enter_context(socket.socket())
    pair = socket.socketpair()
    for end in pair:
        stack.enter_context(end)
    mine, other = group.connection(), stranger.connection()

    sockets = find_group_sockets(before, [group.address], generation=4)

    assert found(sockets) == {mine[0].fileno(), mine[1].fileno()}
    assert sockets.generation == 4
    assert sockets.sever() == 2
    assert not is_open(mine)
    assert is_open(old)
    assert is_open(other)
    assert is_open(pair)
    for listener in (group.listener, late_listener):
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    assert unconnected.fileno() >= 0
    assert is_open(group.connection()), "the listener must keep working"


def test_a_reused_descriptor_is_not_shut_down(stack: ExitStack):
    net = Net(stack)
    before = socket_inodes()
    near, far = net.connection()
    sockets = find_group_sockets(before, [net.address], generation=1)
    assert found(sockets) == {near.fileno(), far.fileno()}
    innocent = net.connection()
    # The group's descriptors now name an unrelated connection, as after a close and a new connect.
    os.dup2(innocent[0].fileno(), near.fileno())
    os.dup2(innocent[1].fileno(), far.fileno())
    assert sockets.sever() == 0
    assert is_open(innocent)


def test_severing_is_repeatable_and_survives_closed_descriptors(stack: ExitStack):
    net = Net(stack)
    before = socket_inodes()
    near, far = net.connection()
    sockets = find_group_sockets(before, [net.address], generation=1)
    near.close()
    assert sockets.sever() <= 1
    far.close()
    assert sockets.sever() == 0


def test_a_listener_is_never_shut_down(stack: ExitStack):
    net = Net(stack)
    handle = SocketHandle(descriptor=net.listener.fileno(), inode=os.fstat(net.listener.fileno()).st_ino)
    assert GroupSockets(generation=1, handles=(handle,)).sever() == 0
    assert is_open(net.connection())


def test_severing_leaves_no_descriptor_behind(stack: ExitStack):
    net = Net(stack)
    before = socket_inodes()
    net.connection()
    gc.collect()  # Free the descriptors that earlier tests left open.
    descriptors = len(os.listdir("/proc/self/fd"))
    find_group_sockets(before, [net.address], generation=1).sever()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_severing_keeps_no_reused_descriptor_open(stack: ExitStack):
    net = Net(stack)
    before = socket_inodes()
    near, far = net.connection()
    sockets = find_group_sockets(before, [net.address], generation=1)
    reader, writer = os.pipe()
    stack.callback(os.close, reader)
    os.dup2(writer, near.fileno())
    os.close(writer)
    os.dup2(net.listener.fileno(), far.fileno())
    gc.collect()  # Free the descriptors that earlier tests left open.
    descriptors = len(os.listdir("/proc/self/fd"))
    assert sockets.sever() == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
