"""How many files a process may have open: connections, and other processes that it watches, are some."""

from __future__ import annotations

import resource

#: enough for every agent of a large job
_WANTED = 65536
_UNLIMITED = 1 << 20


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
