"""Fault injection: the known faults, and the check of a request."""

from __future__ import annotations

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.inputs import InjectFault
from holdfast.coordination.membership import Membership
from holdfast.errors import BadInputError, UnreachableError
from holdfast.protocol.messages.agent import NodeFault, ToWorker
from holdfast.protocol.messages.orders import FAULT_PHASES, Inject
from holdfast.protocol.names import index_of

#: Each fault with its effect, as `holdfast inject --help` shows it.
FAULTS = {
    "kill": "SIGKILL to the node's agent and workers",
    "exit": "the agent and the workers end by themselves",
    "freeze": "SIGSTOP to the agent and the workers",
    "link-down": "the node's network delivers nothing, and its processes live",
    "clock-jump": "the node's wall clock is moved by --by seconds",
    "raise": "an exception in a worker's training thread",
    "memory": "a MemoryError in a worker's training thread",
    "hang": "a worker stops in the middle of a step and does not return",
    "hold": "a worker waits at --phase until another failure ends the step",
    "slow": "a worker's micro-batches take --times as long; 1: as before",
    "slow-link": "a worker's data takes --times as long to reach others",
    "drop": "a worker's connections to all others break",
    "disk-full": "a worker's next checkpoints meet a full disk",
    "corrupt-state": "one bit of a worker's parameters flips",
}
#: Faults that apply to the whole node if no worker is given.
_OF_NODES = ("kill", "exit", "freeze", "link-down", "clock-jump")
_MOST_TIMES = 1000.0
_MOST_JUMP_S = 1e9


def plan_fault(
    config: CoordinatorConfig, members: Membership, request: InjectFault
) -> tuple[int, NodeFault | ToWorker]:
    """Return the connection and the message that cause the fault.

    Without a worker, step or phase, a kill, exit, freeze, link-down or clock-jump goes to the agent of the node, which
    applies it at once. Any other one goes to the given worker, or to worker 0, which then applies it to its whole node.

    Raises:
        BadInputError: faults are not allowed in this job, or the request is invalid.
        UnreachableError: the node or worker does not exist.
    """
    if not config.spec.experiments.allow_faults:
        raise BadInputError("fault injection is refused: start the job with --allow-faults")
    if request.fault not in FAULTS:
        raise BadInputError(f"the fault is {request.fault!r}: it must be one of {', '.join(FAULTS)}")
    if request.fault == "hold" and not request.phase:
        raise BadInputError("hold needs --phase: the phase in which the worker waits until its generation is over")
    if request.fault == "clock-jump" and not (request.worker is None and request.step is None and not request.phase):
        raise BadInputError("clock-jump is for a whole node, and for now: leave out --worker, --step and --phase")
    if not 0.0 < abs(request.by_s) <= _MOST_JUMP_S:
        raise BadInputError(f"--by is {request.by_s:g}: it must be other than 0, and at most {_MOST_JUMP_S:g} seconds")
    if not 1.0 <= request.times <= _MOST_TIMES or (request.times == 1.0 and request.fault != "slow"):
        least = "1 or more (1: as before)" if request.fault == "slow" else "more than 1"
        raise BadInputError(f"--times is {request.times:g}: it must be {least} and at most {_MOST_TIMES:g}")
    node = members.nodes.get(request.node)
    if node is None:
        known = ", ".join(sorted(members.nodes)) or "none"
        raise UnreachableError(f"there is no node {request.node!r}: the nodes are {known}")
    if request.phase and request.phase not in FAULT_PHASES:
        raise BadInputError(f"--phase is {request.phase!r}: it must be one of {', '.join(FAULT_PHASES)}")
    if request.worker is None and request.step is None and not request.phase and request.fault in _OF_NODES:
        return node.connection, NodeFault(fault=request.fault, by_s=request.by_s)
    index = request.worker or 0
    target = next((worker for worker in node.workers if index_of(worker) == index), None)
    if target is None:
        raise UnreachableError(f"node {request.node} has no worker {index}: it has {len(node.workers)}")
    whole = request.worker is None
    order = Inject(fault=request.fault, whole_node=whole, step=request.step, phase=request.phase, times=request.times)
    return node.connection, ToWorker(worker=target, order=order)
