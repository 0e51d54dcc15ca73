"""Which nodes may be expelled if connections fail in one direction and nothing else is wrong."""

from __future__ import annotations

from holdfast.coordination.nodes.probing import TRIES
from holdfast.protocol.events import FailureDetected, NodeRefused
from holdfast.protocol.failures import FailureKind, Severity
from holdfast.protocol.record import Record
from tests.simulation.faults.plans import FaultKind, FaultPlan
from tests.simulation.faults.troubles import DataPlane

ONE_WAY = frozenset({FaultKind.JOIN_UNREACHABLE, FaultKind.BAD_SENDER, FaultKind.ONE_WAY})
#: with these faults alone, no healthy node looks broken
_CALM = ONE_WAY | {FaultKind.JOIN, FaultKind.RETURN, FaultKind.KILL_NODE, FaultKind.KILL_WORKER}


def wrongly_blamed(plan: FaultPlan, data_plane: DataPlane, record: Record | None, event: FailureDetected) -> str:
    """Return an error if the failed node has the state and can connect to all others, else "".

    A node may be blamed if its own connections fail, also by nodes that have the state.
    """
    if any(fault.kind not in _CALM for fault in plan.faults) or plan.crashes or record is None or record.plan is None:
        return ""
    if _only_bad_at_start(plan):
        return f"a node fails although all unreachable nodes were refused at the start: {event}"
    if event.kind != FailureKind.HANG or event.severity != Severity.NODE:
        return ""
    kinds = {fault.kind for fault in plan.faults}
    if kinds & {FaultKind.BAD_SENDER, FaultKind.ONE_WAY}:
        return ""
    members = [member.worker for member in record.plan.members if member.node == event.node]
    connects = data_plane.blocked("", event.node) is None
    if connects and members and not any(worker in record.plan.sources for worker in members):
        return f"a node that has the state is blamed for newcomers that no node can connect to: {event}"
    return ""


def wrongly_refused(plan: FaultPlan, data_plane: DataPlane, record: Record | None, event: NodeRefused) -> str:
    """Return an error if the refused node can connect in both directions with all others, else "".

    If some node cannot connect to others, the fault may lie with that node. The same holds if the job began with such a
    node. A job that needs fewer nodes than it has begins without the last node to join if no node can tell which one is
    faulty.
    """
    if _only_bad_at_start(plan) and event.node not in plan.bad_at_start:
        return f"the job refuses a node at the start that all good nodes can connect to: {event}"
    kinds = {fault.kind for fault in plan.faults}
    only_newcomers = kinds <= _CALM and kinds & ONE_WAY == {FaultKind.JOIN_UNREACHABLE} and not plan.blocked
    members = record.plan.members if record is not None and record.plan is not None else ()
    proven = bool(members) and all(data_plane.blocked("", member.node) is None for member in members)
    if only_newcomers and proven and data_plane.blocked("", event.node) is None:
        return f"the job refuses a newcomer that all others can connect to: {event}"
    return ""


def _only_bad_at_start(plan: FaultPlan) -> bool:
    """Return whether the only fault is a few bad nodes at the start, which the good nodes can identify."""
    bad = plan.bad_at_start
    calm = plan.probes and not plan.faults and not plan.crashes and all(-1 in link for link in plan.blocked)
    return calm and 0 < len(bad) <= TRIES and plan.start_nodes >= len(bad) + TRIES
