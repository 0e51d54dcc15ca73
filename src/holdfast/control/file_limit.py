"""How many files a process may have open: connections, and other processes that it watches, are some."""

from __future__ import annotations

import resource

#: enough for every agent of a large job
_WANTED = 65536
_UNLIMITED = 1 << 20
#: files that each node takes at the most, beside one for each of its workers: of the launcher, and of its zygote
_NODE_FILES = 3
#: files for everything else
_RESERVED_FILES = 32


def file_limit() -> int:
    """Return how many files this process may have open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return files if files != resource.RLIM_INFINITY else _UNLIMITED


def raise_file_limit() -> None:
    """Let this process, and those that it starts, open as many files as they may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def room_for_nodes(workers: int) -> int:
    """Return how many nodes of so many workers a launcher and its zygote may open enough files for."""
    return (file_limit() - _RESERVED_FILES) // (_NODE_FILES + workers)


def few_files(room: int) -> str:
    """Say that there is room for so many nodes only."""
    return f"its processes may open as many files as {max(room, 0)} nodes take; raise the limit (ulimit -n)"
