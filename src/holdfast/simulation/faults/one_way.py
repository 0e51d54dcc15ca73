"""Which nodes may be expelled if connections fail in one direction and nothing else is wrong."""

from __future__ import annotations

from holdfast.protocol.events import FailureDetected, NodeRefused
from holdfast.protocol.failures import FailureKind, Severity
from holdfast.protocol.record import Record
from holdfast.simulation.faults.plans import FaultKind, FaultPlan
from holdfast.simulation.faults.troubles import DataPlane

ONE_WAY = frozenset({FaultKind.JOIN_UNREACHABLE, FaultKind.BAD_SENDER, FaultKind.ONE_WAY})
#: with these alone no healthy node looks as if it were broken
_CALM = ONE_WAY | {FaultKind.JOIN, FaultKind.RETURN, FaultKind.KILL_NODE, FaultKind.KILL_WORKER}


def wrongly_blamed(plan: FaultPlan, record: Record | None, event: FailureDetected) -> str:
    """Return what is wrong with blaming a node: it has the state, and can connect to all others. "" for nothing.

    A node whose own connections fail may be blamed, by nodes that have the state as well.
    """
    if any(fault.kind not in _CALM for fault in plan.faults) or plan.crashes or record is None or record.plan is None:
        return ""
    if event.kind != FailureKind.HANG or event.severity != Severity.NODE:
        return ""
    kinds = {fault.kind for fault in plan.faults}
    if kinds & {FaultKind.BAD_SENDER, FaultKind.ONE_WAY}:
        return ""
    members = [member.worker for member in record.plan.members if member.node == event.node]
    if members and not any(worker in record.plan.sources for worker in members):
        return f"a node that has the state is blamed for newcomers that nobody can connect to: {event}"
    return ""


def wrongly_refused(plan: FaultPlan, data_plane: DataPlane, event: NodeRefused) -> str:
    """Return what is wrong with refusing a newcomer: all other nodes can connect to it, and it to them. "" for nothing.

    If some node cannot connect to others, it may be that node's fault.
    """
    kinds = {fault.kind for fault in plan.faults}
    only_newcomers = kinds <= _CALM and kinds & ONE_WAY == {FaultKind.JOIN_UNREACHABLE}
    if only_newcomers and data_plane.blocked("", event.node) is None:
        return f"a newcomer is refused that all others can connect to: {event}"
    return ""
