"""Temporary folders with an owner: a process that holds a lock (flock) on the folder for as long as it uses it.

The kernel releases the lock however the owner ends. So a folder with a free lock has no owner, and the next process of
the same user can remove it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Generator

from holdfast.errors import BadInputError

#: the longest path of a Unix socket: 108 bytes with the final zero (unix(7))
_MOST_SOCKET_PATH = 107
#: bytes of the longest name that a process gives to a socket of its own: zygote-12345.sock
OWN_SOCKET_NAME = len("zygote-12345.sock")
#: characters that `tempfile.mkdtemp` adds to a prefix
_RANDOM = 8
#: used if the user's temporary folder cannot be
_OTHER_BASES = ("/tmp", "/var/tmp", "/dev/shm")
#: another process that removes abandoned folders can lock a folder before its owner does
_TRIES = 10
_TRY_PAUSE_S = 0.05


def lock_folder(folder: str) -> int:
    """Lock a folder; return the descriptor that holds the lock until it is closed.

    Raises:
        BlockingIOError: another process holds the lock.
        FileNotFoundError: the folder was removed before it was locked.
        OSError: the folder cannot be opened.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(held), os.lstat(folder)):
            raise FileNotFoundError(f"{folder} was removed")
    except OSError:
        os.close(held)
        raise
    return held


def remove_abandoned_folders(pattern: str, *, older_s: float = 0.0) -> None:
    """Remove the folders of this user that match a pattern and have a free lock. Errors are ignored.

    They are renamed first: removing a large one takes seconds, and a new owner may need the name at once. The new name
    has the same beginning and suffix, so that the pattern finds it again if this process is killed meanwhile.

    Args:
        pattern: as for `glob.glob`.
        older_s: only folders that have not changed for this many seconds.
    """
    for folder in glob.glob(pattern):
        with contextlib.suppress(OSError):  # its owner lives, or another process removes it
            status = os.lstat(folder)
            mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if mine and time.time() - status.st_mtime >= older_s:
                held = lock_folder(folder)
                try:
                    name, suffix = os.path.splitext(folder)
                    renamed = f"{name}.{secrets.token_hex(4)}{suffix}"
                    os.rename(folder, renamed)
                    shutil.rmtree(renamed, ignore_errors=True)
                finally:
                    os.close(held)


@contextlib.contextmanager
def owned_folder(kind: str, longest_name: int = OWN_SOCKET_NAME) -> Generator[str]:
    """Make a private temporary folder, and remove it at the end; folders of killed owners are removed first.

    Args:
        kind: part of its name, such as "run". Folders of the same kind are made by this function only.
        longest_name: bytes of the longest path below it at which a Unix socket will listen.

    Raises:
        BadInputError: no temporary folder can be used.
    """
    base = temporary_base(longest_name, len(f"holdfast-{kind}-"))
    prefix = os.path.join(base, f"holdfast-{kind}-")
    remove_abandoned_folders(f"{glob.escape(prefix)}*")
    for _ in range(_TRIES):
        folder = tempfile.mkdtemp(prefix=f"holdfast-{kind}-", dir=base)
        try:
            held = lock_folder(folder)
            break
        except OSError:  # another process takes it for abandoned
            time.sleep(_TRY_PAUSE_S)
    else:
        raise BadInputError(f"no folder can be locked in {base}: set TMPDIR to a folder of a local file system")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def temporary_base(longest_name: int, prefix: int) -> str:
    """Return the folder in which a private folder with sockets can be made: the user's (TMPDIR), else a shorter one.

    Args:
        longest_name: bytes of the longest path of a socket in the private folder.
        prefix: characters of the private folder's prefix.

    Raises:
        BadInputError: none can be used.
    """
    room = _MOST_SOCKET_PATH - len("//") - prefix - _RANDOM - max(longest_name, OWN_SOCKET_NAME)
    usual = ""
    with contextlib.suppress(FileNotFoundError):  # none can be written
        usual = tempfile.gettempdir()
    for base in (usual, *_OTHER_BASES):
        if len(os.fsencode(base)) <= room and os.access(base, os.W_OK | os.X_OK):
            return base
    raise BadInputError(
        f"no temporary folder can be used; the usual one is {usual!r}: set TMPDIR to a writable folder with a "
        f"path of at most {room} characters"
    )
