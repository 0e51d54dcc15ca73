"""A worker's report of a failed collective."""

from __future__ import annotations

import socket
import threading

from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.tasks import SendToCoordinator, WorkerInstruction
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import Decision, DecisionKind, GenerationPlan, Member
from holdfast.runtime.generation.resources import Generations, SharedContext
from holdfast.runtime.groups.communicator import PeerLostError
from holdfast.step_samples import StepSamples

ME, PEER = "a/0/a", "b/0/b"


def complaint_about(error: Exception | str, port: int) -> msg.Complaint:
    """Return the report of a worker with one peer that receives state at this port."""
    instructions: list[WorkerInstruction] = []
    machine = WorkerMachine(ME, samples=StepSamples(seed=0, micro_batches=2, micro_batch=1))
    members = tuple(Member(worker=worker, host="127.0.0.1", state_port=port) for worker in (ME, PEER))
    machine.on_order(
        msg.Begin(
            plan=GenerationPlan(term=1, generation=1, members=members),
            decision=Decision(kind=DecisionKind.START, applied=0),
        )
    )
    generations = Generations(lambda generation, key, value: None)
    shared = SharedContext(
        changed=threading.Condition(threading.RLock()),
        machine=machine,
        resources=generations,
        execute=instructions.extend,
    )
    shared.report_failure(1, error)
    (tell,) = instructions
    assert isinstance(tell, SendToCoordinator)
    assert isinstance(tell.message, msg.Complaint)
    return tell.message


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_after_a_time_out_it_is_told_whom_no_connection_can_be_made_to() -> None:
    fault = complaint_about(PeerLostError("all_to_all failed", timed_out=True), closed_port())
    assert (fault.timed_out, fault.unreachable) == (True, (PEER,))


def test_after_a_time_out_peers_that_can_be_reached_are_not_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        fault = complaint_about(PeerLostError("all_to_all failed", timed_out=True), server.getsockname()[1])
    assert (fault.timed_out, fault.unreachable) == (True, ())


def test_an_error_that_came_at_once_is_told_at_once() -> None:
    fault = complaint_about(PeerLostError("connection reset"), closed_port())
    assert (fault.timed_out, fault.unreachable, fault.detail) == (False, (), "connection reset")
