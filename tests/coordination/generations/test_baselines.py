"""Tests of baseline policies of other systems: surplus nodes wait, and restarts replace reconfiguration."""

from __future__ import annotations

import msgspec
from machinery import Job, attach, called, commit, hello, kept, w, written

from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import ExperimentSpec, JobSpec, RecoverySpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind

STATIC = JobSpec(experiments=ExperimentSpec(static_experts=True, ep_size=2))
RESTART = JobSpec(recovery=RecoverySpec(on_node_failure="restart-all"))


def connect_with_worker(job: Job, node: str, nonce: str) -> None:
    """Connect or reconnect a node with a fresh worker."""
    job.connect(hello(node, session=f"{nonce * 8}"))
    job.deliver(attach(w(node, nonce)))


def test_surplus_nodes_wait_until_they_complete_a_multiple() -> None:
    job = Job(nodes=3, spec=STATIC).boot()
    for node in ("n0", "n1", "n2"):
        job.connect(hello(node))
        job.deliver(attach(w(node)))
    assert job.emitted(ev.GenerationStarted)[0].members == ("n0", "n1")
    assert set(job.orders(msg.Begin)) == {w("n0"), w("n1")}
    for node in ("n0", "n1"):
        job.deliver(msg.Entered(worker=w(node), generation=1, applied=0))
    assert job.orders(msg.Prepare) == {}
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    assert job.orders(msg.Prepare)[w("n3")].plan.workers == (w("n0"), w("n1"), w("n2"), w("n3"))


def test_a_loss_of_a_surplus_node_causes_no_recovery() -> None:
    job = Job(nodes=3, spec=STATIC).boot()
    for node in ("n0", "n1", "n2"):
        job.connect(hello(node))
        job.deliver(attach(w(node)))
    job.lose("n2")
    assert job.kinds == ["FailureDetected", "NodeLeft"]


def test_a_surplus_member_reconnects_with_a_fresh_worker() -> None:
    job = Job(nodes=4, spec=STATIC).start()
    job.step(1, generation=1)
    job.lose("n1")
    for node in ("n0", "n2", "n3"):
        job.report(node, 1)
    assert set(job.orders(msg.Begin)) == {w("n0"), w("n2")}
    (refused,) = job.sent(msg.Refused)
    assert refused.retry
    connect_with_worker(job, "n3", "b")
    assert job.emitted(ev.WorkersChanged)[0].node == "n3"
    # It cannot be used alone, but is used as soon as another node fails.
    for node in ("n0", "n2"):
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=1))
    job.lose("n2")
    job.report("n0", 1)
    assert set(job.orders(msg.Begin)) == {w("n0"), w("n3", "b")}


def test_a_job_with_too_few_nodes_for_one_replica_waits_for_more() -> None:
    job = Job(nodes=2, spec=STATIC).start()
    job.step(1, generation=1)
    job.lose("n1")
    job.report("n0", 1)
    assert job.orders(msg.Begin) == {}
    assert job.machine.state == "recovering"
    job.connect(hello("n2"))
    job.deliver(attach(w("n2")))
    assert set(job.orders(msg.Begin)) == {w("n0"), w("n2")}


def test_an_ep_size_that_does_not_divide_the_experts_is_bad_input() -> None:
    job = Job(nodes=1, spec=JobSpec(experiments=ExperimentSpec(static_experts=True, ep_size=3))).boot()
    job.connect(hello("n0"))
    shape = msg.ExpertShape(layers=2, experts=8, slots=6)
    job.deliver(msgspec.structs.replace(attach(w("n0")), expert_shape=shape))
    (end,) = job.sent(msg.EndNode)
    assert end.exit_code == EXIT_BAD_INPUT
    assert "--ep-size 2 or 4 or 8" in end.why


def test_a_failure_restarts_all_workers_from_the_newest_checkpoint() -> None:
    job = Job(nodes=3, spec=RESTART).start()
    for step in (1, 2, 3):
        job.step(step, generation=1)
    job.deliver(written("n0", 2, "two"))
    job.deliver(kept("n0", 2, "two"))
    job.lose("n1")
    for node in ("n0", "n2"):
        job.report(node, 3)
    assert [refused.retry for refused in job.sent(msg.Refused)] == [True, True]
    assert job.machine.state == "waiting"
    connect_with_worker(job, "n0", "b")
    assert job.orders(msg.Begin) == {}  # the job waits for the other worker
    connect_with_worker(job, "n2", "b")
    begin = job.orders(msg.Begin)
    assert set(begin) == {w("n0", "b"), w("n2", "b")}
    assert begin[w("n0", "b")].decision == msg.Decision(
        kind=DecisionKind.ROLLBACK, applied=2, source=msg.CheckpointSource(name=called(2, "two"))
    )
    assert job.emitted(ev.RolledBack)[0].why == "all workers were started again"
    costs = _redo(job, ("n0", "n2"), generation=2, first=3, until=4)
    assert (costs.action, costs.state_source) == ("restart_all", "checkpoint")


def test_a_restart_without_a_checkpoint_starts_from_step_0() -> None:
    job = Job(nodes=2, spec=RESTART).start()
    job.step(1, generation=1)
    job.lose("n1")
    job.report("n0", 1)
    connect_with_worker(job, "n0", "b")
    assert job.emitted(ev.RolledBack)[0].to_step == 0
    assert job.orders(msg.Begin)[w("n0", "b")].decision.kind is DecisionKind.START
    assert _redo(job, ("n0",), generation=2, first=1, until=2).state_source == "none"


def test_newcomers_are_admitted_by_a_restart() -> None:
    job = Job(nodes=1, spec=JobSpec(recovery=RecoverySpec(on_node_failure="restart-all", join_window=1.0))).start()
    job.step(1, generation=1)
    job.connect(hello("n1"))
    job.deliver(attach(w("n1")))
    assert job.orders(msg.Stop) == {}
    job.deliver(kept("n0", 1, "one"))
    job.tick(1.1)
    assert set(job.orders(msg.Stop)) == {w("n0")}
    job.report("n0", 1)
    assert len(job.sent(msg.Refused)) == 1
    connect_with_worker(job, "n0", "b")
    assert set(job.orders(msg.Begin)) == {w("n0", "b"), w("n1")}
    assert job.emitted(ev.FailureDetected) == []


def test_a_node_that_does_not_return_from_a_restart_is_lost_after_its_lease() -> None:
    job = Job(nodes=3, spec=RESTART).start()
    job.step(1, generation=1)
    job.lose("n2")
    for node in ("n0", "n1"):
        job.report(node, 1)
    connect_with_worker(job, "n0", "b")
    job.tick(1.4)
    job.deliver(msg.CheckpointDamaged(worker=w("n0", "b"), generation=1, name="none", why="-"))
    job.tick(1.4)
    job.deliver(msg.CheckpointDamaged(worker=w("n0", "b"), generation=1, name="none", why="-"))
    job.tick(0.4)
    assert [event.node for event in job.emitted(ev.NodeLeft)] == ["n1"]
    assert set(job.orders(msg.Begin)) == {w("n0", "b")}


def test_a_new_coordinator_continues_a_restart() -> None:
    job = Job(nodes=2, spec=RESTART).start()
    job.step(1, generation=1)
    job.lose("n1")
    job.report("n0", 1)
    job.boot()
    connect_with_worker(job, "n0", "b")
    assert set(job.orders(msg.Begin)) == {w("n0", "b")}


def _redo(job: Job, nodes: tuple[str, ...], *, generation: int, first: int, until: int) -> ev.Recovered:
    """Make restarted nodes repeat lost steps and train one more, which ends the recovery."""
    for node in nodes:
        job.deliver(msg.Entered(worker=w(node, "b"), generation=generation, applied=first - 1))
    for step in range(first, until + 1):
        assert job.emitted(ev.Recovered) == []
        for node in nodes:
            message = msg.Applied(worker=w(node, "b"), generation=generation, step=step, commit=_V, world=len(nodes))
            job.deliver(message)
    return job.emitted(ev.Recovered)[0]


_V = commit()
