"""The limit on open files of a process. Connections, and watched processes, count as files."""

from __future__ import annotations

import resource

#: enough for every agent of a large job
_WANTED = 65536
_UNLIMITED = 1 << 20
#: files that each node needs, in addition to one per worker, in the launcher or in its zygote
_NODE_FILES = 3
#: files for everything else
_RESERVED_FILES = 32


def file_limit() -> int:
    """Return how many files this process may have open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return files if files != resource.RLIM_INFINITY else _UNLIMITED


def raise_file_limit() -> None:
    """Raise the soft limit of this process and its future children to 65536, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def room_for_nodes(workers: int) -> int:
    """Return for how many nodes a launcher and its zygote can open enough files."""
    return (file_limit() - _RESERVED_FILES) // (_NODE_FILES + workers)


def describe_limit(room: int) -> str:
    """Return a message that the limit on open files allows this many nodes only."""
    return f"its processes may open as many files as {max(room, 0)} nodes take; raise the limit (ulimit -n)"
