"""Finds the sockets of a group, and later breaks exactly those, even if descriptors were reused meanwhile.

gloo does not expose its sockets. They are the descriptors that appeared while the group was made, and have an address
that was exchanged in the rendezvous. The second test excludes sockets that other threads opened at the same time.
Listeners are left alone, because shutting one down ends the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SocketHandle:
    """A descriptor, and the inode that it referred to when it was found."""

    descriptor: int
    inode: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSockets:
    """The connected sockets of one generation's group."""

    generation: int
    handles: tuple[SocketHandle, ...]

    def sever(self) -> int:
        """Shut down all sockets that still exist; return how many. Any thread may call it, repeatedly."""
        return sum(_shut_down(handle) for handle in self.handles)


def socket_inodes() -> dict[int, int]:
    """Return the inodes of this process's open sockets, by descriptor."""
    inodes: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        # The listing's own descriptor is closed by now, and other threads open and close descriptors.
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                inodes[int(name)] = int(target[8:-1])
    return inodes


def find_group_sockets(before: Mapping[int, int], addresses: Iterable[bytes], *, generation: int) -> GroupSockets:
    """Return the sockets of a group that was just made: they are new, connected, and one end is at an exchanged
    address.

    Args:
        before: `socket_inodes()` from before it was made.
        addresses: the values exchanged in the rendezvous; they contain the members' listening addresses.
        generation: the group's generation.
    """
    exchanged = tuple(addresses)
    handles: list[SocketHandle] = []
    for descriptor, inode in socket_inodes().items():
        if before.get(descriptor) == inode:
            continue
        handle = SocketHandle(descriptor=descriptor, inode=inode)
        with open_duplicate(handle) as candidate:
            if candidate is not None and _is_group_socket(candidate, exchanged):
                handles.append(handle)
    return GroupSockets(generation=generation, handles=tuple(handles))


@contextlib.contextmanager
def open_duplicate(handle: SocketHandle) -> Generator[socket.socket | None]:
    """Yield a duplicate of a handle's socket, which is closed at the end; the original stays open. Yield None if the
    descriptor is closed or refers to something else by now.

    The duplicate is made before the comparison, so that the descriptor cannot be reused in between.
    """
    try:
        copy = os.dup(handle.descriptor)
    except OSError:
        yield None
        return
    duplicate = _socket_of(copy, handle.inode)
    if duplicate is None:
        os.close(copy)
        yield None
        return
    with duplicate:
        yield duplicate


def _socket_of(descriptor: int, inode: int) -> socket.socket | None:
    """Return a socket object that owns the descriptor, and closes it with itself. Return None if the descriptor has
    another inode than this, or cannot be used; it then stays open.
    """
    try:
        return socket.socket(fileno=descriptor) if os.fstat(descriptor).st_ino == inode else None
    except OSError:
        return None


def _shut_down(handle: SocketHandle) -> bool:
    """Shut down a socket in both directions, and return whether that was done. It is not if the descriptor refers to
    something else by now, or to a listener, or to a socket that is no longer connected.
    """
    with open_duplicate(handle) as duplicate:
        if duplicate is None:
            return False
        try:
            if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:  # no longer connected
            return False
        return True


def _is_group_socket(candidate: socket.socket, exchanged: tuple[bytes, ...]) -> bool:
    """Return whether a socket is connected, is not a listener, and has one end at an address that an exchanged value
    contains.

    Args:
        exchanged: the values that members exchanged in the rendezvous; they contain addresses in C's form.
    """
    try:
        if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        ends = (
            _pack_address(candidate.family, candidate.getsockname()),
            _pack_address(candidate.family, candidate.getpeername()),
        )
    except OSError:  # not connected
        return False
    return any(end and end in address for end in ends for address in exchanged)


def _pack_address(family: int, name: Any) -> bytes:
    """Return the start of the C socket address: family, port (for IPv6 also the flow label), address. Return b"" for
    anything but TCP/IP.

    Args:
        name: the address as `socket.getsockname` returns it.
    """
    if family not in (socket.AF_INET, socket.AF_INET6):
        return b""
    host, port = str(name[0]), int(name[1])
    if family == socket.AF_INET:
        return struct.pack("=H", family) + struct.pack("!H", port) + socket.inet_pton(family, host)
    address = socket.inet_pton(family, host.split("%", 1)[0])
    return struct.pack("=H", family) + struct.pack("!HI", port, name[2]) + address
