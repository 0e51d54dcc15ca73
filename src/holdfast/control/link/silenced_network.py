"""Fault injection: silence the network of a process as a broken link would. It needs no privileges."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct

#: socket option of Linux: a classic packet filter through which all incoming data passes
_SO_ATTACH_FILTER = 26
_RETURN = 0x06


def block_incoming_tcp() -> int:
    """Inject a fault: block all incoming data on every TCP socket of this process. Return the number of these sockets.

    Peers get no sign of it: their data is not acknowledged, connections to listeners time out, and no socket sees an
    end. Outgoing data still goes out, so the caller must stop sending.
    """
    code = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))  # one instruction: keep 0 bytes
    program = struct.pack("HP", 1, ctypes.addressof(code))
    return sum(_attach_filter(int(name), program) for name in os.listdir("/proc/self/fd"))


def _attach_filter(descriptor: int, program: bytes) -> bool:
    """Attach a packet filter to a TCP socket.

    Return False if the descriptor is not a TCP socket, or was closed meanwhile.
    """
    with contextlib.suppress(OSError):  # other threads may close theirs meanwhile
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
                    copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                    return True
    return False
