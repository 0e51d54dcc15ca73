"""Refuses to take over from a coordinator or a pool server that still serves.

A second server with the same store is a mistake: the agents connect to the address of the first one, so no node would
connect to the second one, and the first one would be superseded. If the first one is dead or hangs, it does not answer,
and the second one takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, Protocol

from holdfast.control.registry import JobEntry, live_jobs
from holdfast.errors import BadInputError, HoldfastError

#: seconds that the predecessor has to accept a connection, and again to answer
_ANSWER_S = 2.0


class StatusClient(Protocol):
    """A client with a `status` that contains the name of the job or the pool."""

    def status(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class ClientFactory(Protocol):
    """Makes a client for one server. Raises HoldfastError if its address or certificate cannot be used."""

    def __call__(self, job: JobEntry, *, timeout_s: float) -> StatusClient: ...


async def check_predecessor_ended(
    make_client: ClientFactory, name: str, url: str, own: JobEntry, registry: Path | None, kind: str = "job"
) -> None:
    """Ask the server that used this store before for its status, to check that it no longer serves.

    If it cannot be reached, or refuses the token, it counts as ended. Its token is in the registry, or else is assumed
    to be the own one.

    Args:
        make_client: Makes the client for this kind of server.
        name: The name of the job or the pool.
        url: The address of the previous server, or "" if it is not known.
        own: The address and the token of the new server.
        registry: The folder with the jobs of this machine and their tokens, or None.
        kind: "job" or "pool".

    Raises:
        BadInputError: The previous server answers.
    """
    if not url or url == own.url:  # The new server listens there, so the one before does not.
        return
    listed = live_jobs(registry) if registry is not None else ()
    access = next((entry for entry in listed if entry.url == url), own)
    entry = JobEntry(url=url, token=access.token, job=name, pid=0, tls_ca=access.tls_ca)
    status: dict[str, Any] = {}
    with contextlib.suppress(HoldfastError), contextlib.closing(make_client(entry, timeout_s=_ANSWER_S)) as client:
        status = await asyncio.to_thread(client.status)
    if status.get(kind) == name:
        raise BadInputError(
            f"another server of {kind} {name!r} answers at {url}, with the same store: end that one first, or give "
            "another --store"
        )
