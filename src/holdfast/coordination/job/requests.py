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
from holdfast.coordination.job.context import JobContext
from holdfast.coordination.job.injection import plan_fault
from holdfast.protocol.events import StoreReturned


def handle_request(context: JobContext, request: Request) -> None:
    """Execute a request: inject a fault; drain, move or readmit nodes; save; shut down; use a placement search's
    result, the store's return, or the pool's message.

    Raises:
        BadInputError, UnreachableError, RefusedError: the request is refused; the message says why.
    """
    match request:
        case InjectFault():
            context.transaction.send(*plan_fault(context.config, context.members, request))
        case Drain():
            context.draining.request(request.nodes)
        case MoveNodes():
            context.draining.request(request.nodes, request.to, stays=True)
        case Undrain():
            if not context.draining.undrain(request.node):
                context.escalation.readmit_node(request.node)
        case SaveState():
            context.checkpoints.request_checkpoint(context.ledger.committed)
        case Shutdown():
            context.closing.request(request)
        case Planned():
            context.rebalancing.on_planned(request)
        case StoreBack(away_s):
            context.transaction.emit(StoreReturned, away_s=away_s)
        case PoolSaid():
            context.pool_client.on_shares(request)
