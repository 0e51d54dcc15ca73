"""Tests of a standby's agent: its role in Hello, kept warm states, and workers that fail while they warm up."""

from __future__ import annotations

import msgspec
import pytest
from test_agent_machine import STOPPED, Bench, attach, begin_node, down, messages_of

from holdfast.coordination.agent.identity import NodeIdentity
from holdfast.coordination.agent.instructions import KillHung, SendToWorkers, StartWorker
from holdfast.coordination.agent.machine import AgentMachine
from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from holdfast.protocol.messages import any_side as msg


@pytest.mark.parametrize("standby", [True, False])
def test_hello_contains_whether_the_node_is_a_standby(standby: bool) -> None:
    node = NodeIdentity(job="job", node="node-0", workers=1, digest="d", agent_pid=7, standby=standby)
    machine = AgentMachine(node, lambda: "0" * 8)
    machine.start()
    (hello,) = messages_of(machine.on_connected(0.0))
    assert isinstance(hello, msg.Hello)
    assert hello.standby is standby


def test_a_warm_order_is_passed_on_unless_its_term_is_older() -> None:
    bench = Bench(term=2)
    order = msg.Warm(term=2)
    assert bench.order(order) == [SendToWorkers((bench.worker,), order)]
    assert bench.order(msg.Warm(term=1)) == []


def test_a_new_coordinator_is_sent_warmed_before_begun() -> None:
    bench = Bench()
    bench.order(msg.Warm(term=1))
    assert bench.kept() == [attach(bench.worker)]
    warmed = msg.Warmed(worker=bench.worker, seconds=2.0)
    bench.deliver(warmed)
    assert bench.kept() == [attach(bench.worker), warmed]
    bench.receive(begin_node(1, 1, bench.worker))
    assert bench.kept() == [attach(bench.worker), warmed, msg.Begun(worker=bench.worker, generation=1)]


@pytest.mark.parametrize(
    ("exit_code", "final"), [(EXIT_BAD_INPUT, False), (EXIT_FAILED, True), (EXIT_DONE, True)], ids=str
)
def test_a_script_that_ends_in_a_shadow_step_does_not_end_the_job(exit_code: int, final: bool) -> None:
    bench = Bench()
    bench.order(msg.Warm(term=1))
    ending = msgspec.structs.replace(down(bench.worker), exit_code=exit_code, final=final)
    out = bench.machine.on_worker_ended(ending, bench.now, clean=exit_code == EXIT_DONE)
    cold, gone = messages_of(out)
    assert isinstance(cold, msg.FromWorker)
    assert isinstance(cold.message, msg.Warmed)
    assert cold.message.error
    assert isinstance(gone, msg.WorkerDown)
    assert (gone.final, gone.exit_code, gone.error) == (False, EXIT_FAILED, None)
    assert isinstance(out[-1], StartWorker)  # the new worker is cold


def test_failed_warm_ups_do_not_count_as_restarts() -> None:
    bench = Bench()
    for _ in range(20):
        bench.order(msg.Warm(term=1))
        assert isinstance(bench.machine.on_worker_ended(down(bench.worker), bench.now, clean=False)[-1], StartWorker)
        bench.deliver(attach(bench.worker))


@pytest.mark.parametrize("heard", ["warmed", "begun"])
def test_the_end_of_a_warm_or_training_worker_is_reported_unchanged(heard: str) -> None:
    bench = Bench()
    bench.order(msg.Warm(term=1))
    if heard == "warmed":
        bench.deliver(msg.Warmed(worker=bench.worker, seconds=2.0))
    else:
        bench.receive(begin_node(1, 1, bench.worker))
    before = bench.worker
    assert messages_of(bench.die(exit_code=EXIT_BAD_INPUT)) == [down(before, EXIT_BAD_INPUT)]


def test_a_warm_worker_that_is_stopped_for_longer_than_a_lease_is_killed() -> None:
    bench = Bench()
    bench.order(msg.Warm(term=1))
    bench.deliver(msg.Warmed(worker=bench.worker, seconds=2.0))
    assert KillHung(bench.worker, STOPPED) not in bench.machine.tick(1.0, {bench.worker})
    assert KillHung(bench.worker, STOPPED) in bench.machine.tick(2.1, {bench.worker})
