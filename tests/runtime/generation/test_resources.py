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


def test_unreachable_peers_are_reported_after_a_timeout() -> None:
    fault = complaint_about(PeerLostError("all_to_all failed", timed_out=True), closed_port())
    assert (fault.timed_out, fault.unreachable) == (True, (PEER,))


def test_reachable_peers_are_not_reported_after_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        fault = complaint_about(PeerLostError("all_to_all failed", timed_out=True), server.getsockname()[1])
    assert (fault.timed_out, fault.unreachable) == (True, ())


def test_an_immediate_error_is_reported_without_checking_peers() -> None:
    fault = complaint_about(PeerLostError("connection reset"), closed_port())
    assert (fault.timed_out, fault.unreachable, fault.detail) == (False, (), "connection reset")
