"""Which nodes may be expelled if connections fail in one direction and nothing else is wrong."""

from __future__ import annotations

from holdfast.coordination.nodes.probing import TRIES
from holdfast.protocol.events import FailureDetected, NodeRefused
from holdfast.protocol.failures import FailureKind, Severity
from holdfast.protocol.record import Record
from tests.simulation.faults.plans import FaultKind, FaultPlan
from tests.simulation.faults.troubles import DataPlane

ONE_WAY = frozenset({FaultKind.JOIN_UNREACHABLE, FaultKind.BAD_SENDER, FaultKind.ONE_WAY})
#: with these alone no healthy node looks as if it were broken
_CALM = ONE_WAY | {FaultKind.JOIN, FaultKind.RETURN, FaultKind.KILL_NODE, FaultKind.KILL_WORKER}


def wrongly_blamed(plan: FaultPlan, data_plane: DataPlane, record: Record | None, event: FailureDetected) -> str:
    """Return what is wrong with blaming a node that has the state and can connect to all others; "" for nothing.

    A node whose own connections fail may be blamed, also by nodes that have the state.
    """
    if any(fault.kind not in _CALM for fault in plan.faults) or plan.crashes or record is None or record.plan is None:
        return ""
    if _only_bad_at_start(plan):
        return f"a node fails although all that others cannot connect to were refused at the start: {event}"
    if event.kind != FailureKind.HANG or event.severity != Severity.NODE:
        return ""
    kinds = {fault.kind for fault in plan.faults}
    if kinds & {FaultKind.BAD_SENDER, FaultKind.ONE_WAY}:
        return ""
    members = [member.worker for member in record.plan.members if member.node == event.node]
    connects = data_plane.blocked("", event.node) is None
    if connects and members and not any(worker in record.plan.sources for worker in members):
        return f"a node that has the state is blamed for newcomers that nobody can connect to: {event}"
    return ""


def wrongly_refused(plan: FaultPlan, data_plane: DataPlane, record: Record | None, event: NodeRefused) -> str:
    """Return what is wrong with refusing a node that can connect in both directions with all others; "" for nothing.

    If some node cannot connect to others, the fault may lie with that node. The same holds if the job began with such a
    node. A job that needs fewer nodes than it has begins without the last one if no node can tell which one is faulty.
    """
    if _only_bad_at_start(plan) and event.node not in plan.bad_at_start:
        return f"a node is refused at the start that all good ones can connect to: {event}"
    kinds = {fault.kind for fault in plan.faults}
    only_newcomers = kinds <= _CALM and kinds & ONE_WAY == {FaultKind.JOIN_UNREACHABLE} and not plan.blocked
    members = record.plan.members if record is not None and record.plan is not None else ()
    proven = bool(members) and all(data_plane.blocked("", member.node) is None for member in members)
    if only_newcomers and proven and data_plane.blocked("", event.node) is None:
        return f"a newcomer is refused that all others can connect to: {event}"
    return ""


def _only_bad_at_start(plan: FaultPlan) -> bool:
    """Whether nothing is wrong but with few of the first nodes: then the good ones find out which these are."""
    bad = plan.bad_at_start
    calm = plan.probes and not plan.faults and not plan.crashes and all(-1 in link for link in plan.blocked)
    return calm and 0 < len(bad) <= TRIES and plan.start_nodes >= len(bad) + TRIES
