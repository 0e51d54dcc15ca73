"""Refuses to take over from a coordinator or a pool server that still serves.

To start a second one with the same store is a mistake: the agents connect to the address of the first one, so no node
would come to the second one, and the first one would end. If the first one is dead or hangs, it does not answer, and
the second one takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, Protocol

from holdfast.control.registry import JobEntry, live_jobs
from holdfast.errors import BadInputError, HoldfastError

#: seconds in which one that serves answers
_ANSWER_S = 2.0


class StatusClient(Protocol):
    """A client whose `status` names what it serves."""

    def status(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class MakeClient(Protocol):
    """Makes a client."""

    def __call__(self, job: JobEntry, *, timeout_s: float) -> StatusClient: ...


async def refuse_second(
    make: MakeClient, name: str, url: str, mine: JobEntry, registry: Path | None, kind: str = "job"
) -> None:
    """Raise an error if the one before still serves.

    Args:
        make: The client for this kind of server.
        name: The name of the job or the pool.
        url: The address of the one before, "" if it is not known.
        mine: The address and the token of the new one.
        registry: The folder of the jobs of this machine, None for none.
        kind: "job" or "pool".

    Raises:
        BadInputError: it answers.
    """
    if not url or url == mine.url:
        return
    listed = live_jobs(registry) if registry is not None else ()
    token, tls_ca = next(((one.token, one.tls_ca) for one in listed if one.url == url), (mine.token, mine.tls_ca))
    client = make(JobEntry(url=url, token=token, job=name, pid=0, tls_ca=tls_ca), timeout_s=_ANSWER_S)
    status: dict[str, Any] = {}
    with contextlib.closing(client), contextlib.suppress(HoldfastError):
        status = await asyncio.to_thread(client.status)
    if status.get(kind) == name:
        raise BadInputError(
            f"another server of {kind} {name!r} answers at {url}, with the same store: end that one first, or give "
            "another --store"
        )
