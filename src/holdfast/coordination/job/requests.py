"""Requests of users, of the shell and of the pool. They are handled in every job phase."""

from __future__ import annotations

from holdfast.coordination.inputs import (
    Drain,
    InjectFault,
    MoveNodes,
    Planned,
    PoolSaid,
    Request,
    SaveState,
    Shutdown,
    StoreBack,
    Undrain,
)
from holdfast.coordination.job.injection import injection
from holdfast.coordination.job.parts import JobParts
from holdfast.protocol.events import StoreReturned


def grant(parts: JobParts, request: Request) -> None:
    """Execute a request.

    Raises:
        BadInputError, UnreachableError, RefusedError: the request is refused; the message says why.
    """
    match request:
        case InjectFault():
            parts.transaction.send(*injection(parts.config, parts.members, request))
        case Drain():
            parts.departures.ask(request.nodes)
        case MoveNodes():
            parts.departures.ask(request.nodes, request.to, stays=True)
        case Undrain():
            if not parts.departures.undrain(request.node):
                parts.ladder.readmit_node(request.node)
        case SaveState():
            parts.checkpoints.want(parts.ledger.committed)
        case Shutdown():
            parts.closing.ask(request)
        case Planned():
            parts.rebalancing.came(request)
        case StoreBack(away_s):
            parts.transaction.emit(StoreReturned, away_s=away_s)
        case PoolSaid():
            parts.tenant.on_shares(request)
