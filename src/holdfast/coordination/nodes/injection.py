"""Fault injection: what a user may break, and how."""

from __future__ import annotations

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.inputs import FailNode
from holdfast.coordination.nodes.membership import Membership
from holdfast.errors import BadInputError, UnreachableError
from holdfast.protocol.messages.agent import NodeFault, ToWorker
from holdfast.protocol.messages.orders import FAULT_PHASES, Inject
from holdfast.protocol.names import index_of

WAYS = ("kill", "exit", "raise", "stop", "hold")


def injection(config: CoordinatorConfig, members: Membership, fault: FailNode) -> tuple[int, NodeFault | ToWorker]:
    """Return whom to tell what, so that the fault happens.

    Raises:
        BadInputError: faults are not allowed here, or there is no such fault or phase.
        UnreachableError: there is no such node or worker.
    """
    if not config.allow_faults:
        raise BadInputError("fault injection is refused: start the job with --allow-faults")
    if fault.how not in WAYS:
        raise BadInputError(f"--how is {fault.how!r}: it must be one of {', '.join(WAYS)}")
    if fault.how == "hold" and not fault.phase:
        raise BadInputError("--how hold needs --phase: where the worker is to wait until its generation is over")
    node = members.nodes.get(fault.node)
    if node is None:
        known = ", ".join(sorted(members.nodes)) or "none"
        raise UnreachableError(f"there is no node {fault.node!r}: the nodes are {known}")
    if fault.phase and fault.phase not in FAULT_PHASES:
        raise BadInputError(f"--phase is {fault.phase!r}: it must be one of {', '.join(FAULT_PHASES)}")
    if fault.worker is None and fault.step is None and not fault.phase and fault.how != "raise":
        return node.connection, NodeFault(how=fault.how)
    index = fault.worker or 0
    target = next((worker for worker in node.workers if index_of(worker) == index), None)
    if target is None:
        raise UnreachableError(f"node {fault.node} has no worker {index}: it has {len(node.workers)}")
    order = Inject(how=fault.how, whole_node=fault.worker is None, step=fault.step, phase=fault.phase)
    return node.connection, ToWorker(worker=target, order=order)
