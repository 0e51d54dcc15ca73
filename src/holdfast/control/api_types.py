"""Types and limits of the coordinator's HTTP API, for client and server."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.errors import EXIT_ENDED

MAX_BODY_BYTES = 65536
MAX_WAIT_S = 60.0
#: Header of an answer to /events: "1" if no event will follow.
END_HEADER = "x-holdfast-end"


class InjectRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /inject."""

    fault: Annotated[str, Meta(max_length=16)]
    node: Annotated[str, Meta(max_length=64)]
    worker: Annotated[int, Meta(ge=0)] | None = None
    step: Annotated[int, Meta(ge=1)] | None = None
    phase: Annotated[str, Meta(max_length=64)] = ""
    times: float = 3.0
    by_s: float = 3600.0


class ShutdownRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /shutdown."""

    exit_code: Annotated[int, Meta(ge=0, le=255)] = EXIT_ENDED
    why: Annotated[str, Meta(max_length=1000)] = "shut down on request"
    save: bool = False


class NodesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /nodes."""

    count: Annotated[int, Meta(ge=1, le=1024)] = 1


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /drain."""

    nodes: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=4096)]
    dry_run: bool = False


class MoveRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /move."""

    nodes: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=4096)]
    to: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=4096)] = ()
    dry_run: bool = False


class UndrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /undrain."""

    node: Annotated[str, Meta(max_length=64)]
