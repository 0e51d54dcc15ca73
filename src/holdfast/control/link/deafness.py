"""A process whose network is silent, as by a broken link: fault injection that needs no rights."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct

#: Linux: a program of the classic packet filter, through which whatever comes for the socket has to go
_SO_ATTACH_FILTER = 26
_RETURN = 0x06


def go_deaf() -> int:
    """Let nothing come in any more, on any TCP socket that this process has; return how many these are.

    Nobody is told: what peers send is not even acknowledged, connections to listeners come to nothing, and no socket
    sees an end. What this process sends still goes out: it is for the caller to keep silent.
    """
    code = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))  # one instruction: keep 0 bytes
    program = struct.pack("HP", 1, ctypes.addressof(code))
    return sum(_attach(int(name), program) for name in os.listdir("/proc/self/fd"))


def _attach(descriptor: int, program: bytes) -> bool:
    with contextlib.suppress(OSError):  # (others are closed meanwhile)
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
                    copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                    return True
    return False
