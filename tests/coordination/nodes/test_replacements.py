"""Tests of standbys that replace lost nodes at once, with the same rank and share, and of other policies."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from machinery import Job, attach, hello, reduced, w

from holdfast.coordination.inputs import Drain
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind
from holdfast.protocol.record import KnownCheckpoint

Policy = Literal["auto", "standby", "shrink", "wait", "restart-all"]


def beside(policy: Policy = "auto", *, warm: bool = True) -> Job:
    """Return a job of three nodes that have committed step 1, with standby s0."""
    job = Job(spec=JobSpec(recovery=RecoverySpec(on_node_failure=policy)))
    job.start()
    job.step(1)
    add_standby(job, "s0", warm=warm)
    return job


def add_standby(job: Job, name: str, *, warm: bool = True, rack: str = "", zone: str = "") -> None:
    job.connect(msgspec.structs.replace(hello(name), standby=True, rack=rack, zone=zone))
    job.deliver(attach(w(name)))
    if warm:
        job.deliver(msg.Warmed(worker=w(name), seconds=0.5))


def members(job: Job) -> tuple[str, ...]:
    plan = job.machine.record.plan
    assert plan is not None
    return plan.workers


def test_a_standby_takes_the_lost_rank_but_no_part_of_the_repeated_step() -> None:
    job = beside()
    job.lose("n1")
    job.report("n0", 1, summed=(0, 3))
    job.report("n2", 1, summed=(2,))
    assert members(job) == (w("n0"), w("s0"), w("n2"))
    begin = job.orders(msg.Begin)
    assert begin.keys() == {w("n0"), w("s0"), w("n2")}
    assert begin[w("s0")].assignment == ((0, 3, 1), (), (2, 5, 4))
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (begun.reason, begun.decision, begun.world_size) == ("replace", DecisionKind.REDO, 3)
    assert [joined.names for joined in job.emitted(ev.NodesJoined)] == [("s0",)]
    for name, received in (("n0", 0), ("n2", 0), ("s0", 55)):
        job.deliver(msg.Entered(worker=w(name), generation=2, applied=1, received_bytes=received))
    job.step(2, "n0", "s0", "n2", generation=2)
    (recovered,) = job.emitted(ev.Recovered)
    assert recovered.action == "replace"
    (moved,) = job.emitted(ev.NodeMoved)
    assert (moved.from_node, moved.to_node, moved.reason, moved.moved_bytes) == ("n1", "s0", "failure", 55)
    assert moved.down_s == recovered.down_s


def test_a_replacement_finishes_a_step_that_all_had_reduced() -> None:
    job = beside()
    job.lose("n1")
    job.report("n0", 1, msg.Phase.READY, **reduced(1.0))
    job.report("n2", 1, msg.Phase.READY, **reduced(1.0))
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (begun.reason, begun.decision) == ("replace", DecisionKind.FORWARD)
    assert members(job) == (w("n0"), w("s0"), w("n2"))


@pytest.mark.parametrize("policy", ["auto", "standby"])
def test_a_cold_standby_is_not_awaited_and_joins_once_warm(policy: Policy) -> None:
    job = beside(policy, warm=False)
    job.lose("n1")
    job.report("n0", 1)
    job.report("n2", 1)
    assert members(job) == (w("n0"), w("n2"))
    for name in ("n0", "n2"):
        job.deliver(msg.Entered(worker=w(name), generation=2, applied=1))
    assert job.machine.record.pending is None
    job.deliver(msg.Warmed(worker=w("s0"), seconds=0.5))
    pending = job.machine.record.pending
    assert pending is not None
    assert pending.workers == (w("n0"), w("n2"), w("s0"))
    assert [joined.names for joined in job.emitted(ev.NodesJoined)] == [("s0",)]


def test_the_shrink_policy_does_not_use_standbys() -> None:
    job = beside("shrink")
    job.lose("n1")
    job.report("n0", 1)
    job.report("n2", 1)
    assert members(job) == (w("n0"), w("n2"))
    for name in ("n0", "n2"):
        job.deliver(msg.Entered(worker=w(name), generation=2, applied=1))
    job.tick(0.5)
    assert job.machine.record.pending is None


def test_the_wait_policy_uses_even_a_cold_standby_or_waits_for_a_node() -> None:
    job = beside("wait", warm=False)
    job.lose("n1")
    job.report("n0", 1)
    job.report("n2", 1)
    assert members(job) == (w("n0"), w("s0"), w("n2"))
    for name in ("n0", "n2", "s0"):
        job.deliver(msg.Entered(worker=w(name), generation=2, applied=1))
    job.lose("n2")
    job.report("n0", 1)
    job.report("s0", 1)
    assert job.machine.record.generation == 2
    job.tick(0.5)
    (waiting,) = job.emitted(ev.JobWaiting)
    assert waiting.nodes == 1
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    assert members(job) == (w("n0"), w("s0"), w("n3"))


def test_the_wait_policy_waits_until_a_returning_node_can_train() -> None:
    job = Job(spec=JobSpec(recovery=RecoverySpec(on_node_failure="wait"))).start()
    job.step(1)
    job.lose("n1")
    job.report("n0", 1)
    job.report("n2", 1)
    job.connect(msgspec.structs.replace(hello("n1"), session="cafecafe", agent_pid=777))
    assert job.machine.record.generation == 1, "its worker is not there yet"
    job.deliver(attach(w("n1", "b")))
    assert job.machine.record.generation == 2
    assert members(job) == (w("n0"), w("n1", "b"), w("n2"))


def test_a_new_coordinator_also_waits_until_a_returning_node_can_train() -> None:
    job = Job(spec=JobSpec(recovery=RecoverySpec(on_node_failure="wait"))).start()
    job.step(1)
    job.lose("n1")
    job.report("n0", 1)
    job.report("n2", 1)
    job.boot(takeover=True)
    for name in ("n0", "n2"):
        entered = msg.Entered(worker=w(name), generation=1, applied=1)
        job.connect(hello(name, kept=(attach(w(name)), msg.Begun(worker=w(name), generation=1), entered), term=1))
    job.connect(msgspec.structs.replace(hello("n1"), session="cafecafe", agent_pid=777))
    job.report("n0", 1)
    job.report("n2", 1)
    assert job.machine.record.generation == 1, "its worker is not there yet"
    job.deliver(attach(w("n1", "b")))
    assert job.machine.record.generation == 2
    assert members(job) == (w("n0"), w("n1", "b"), w("n2"))


def test_a_lost_replacement_that_returns_counts_only_once_it_attaches() -> None:
    job = beside("wait")
    job.lose("n1")
    job.lose("n2")
    job.report("n0", 1)
    job.lose("s0")
    job.connect(msgspec.structs.replace(hello("s0"), standby=True, session="cafecafe", agent_pid=777))
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    assert job.machine.record.generation == 1, "only two of the three nodes are connected"
    job.deliver(attach(w("s0", "b")))
    assert job.machine.record.generation == 2
    assert set(members(job)) == {w("n0"), w("n3"), w("s0", "b")}


def test_one_of_two_lost_nodes_is_replaced_by_the_only_standby() -> None:
    job = beside()
    job.lose("n1")
    job.lose("n2")
    job.report("n0", 1)
    assert members(job) == (w("n0"), w("s0"))
    (begun,) = job.emitted(ev.GenerationStarted)
    assert begun.reason == "failure"


def test_a_returning_node_takes_its_rank_before_a_standby() -> None:
    job = beside()
    job.lose("n1")
    job.report("n0", 1)
    job.connect(hello("n1", session="1" * 8))
    job.deliver(attach(w("n1", "b")))
    job.report("n2", 1)
    assert members(job) == (w("n0"), w("n1", "b"), w("n2"))
    assert job.machine.members.standbys.keys() == {"s0"}


def test_another_standby_takes_the_rank_if_the_first_is_lost() -> None:
    job = beside()
    add_standby(job, "s1")
    job.lose("n1")
    job.report("n0", 1)
    job.lose("s0")
    job.report("n2", 1)
    assert members(job) == (w("n0"), w("s1"), w("n2"))


def test_a_standby_in_the_same_rack_is_preferred_and_reported() -> None:
    job = Job()
    job.boot()
    for index in range(3):
        job.connect(msgspec.structs.replace(hello(f"n{index}"), rack=f"r{index}"))
        job.deliver(attach(w(f"n{index}")))
    for index in range(3):
        job.deliver(msg.Entered(worker=w(f"n{index}"), generation=1, applied=0))
    job.step(1)
    add_standby(job, "s0", rack="r0")
    add_standby(job, "s1", rack="r1")
    job.lose("n1")
    job.report("n0", 1)
    job.report("n2", 1)
    assert members(job) == (w("n0"), w("s1"), w("n2"))
    for name in ("n0", "s1", "n2"):
        job.deliver(msg.Entered(worker=w(name), generation=2, applied=1))
    job.step(2, "n0", "s1", "n2", generation=2)
    assert job.emitted(ev.NodeMoved)[0].detail == "it is in rack r1, too"


@pytest.mark.parametrize(
    ("places", "expected", "detail"),
    [
        ([("r0", "z0"), ("r9", "z1"), ("r1", "z1")], "s2", "it is in rack r1, too"),
        ([("r1", "z0"), ("r1", "z1")], "s1", "it is in rack r1, too"),
        ([("r0", "z0"), ("r9", "z1")], "s1", "no standby that could is in rack r1; it is in zone z1, too"),
        ([("r0", "z0"), ("r2", "z2")], "s0", "no standby that could is in rack r1 or zone z1"),
        ([("", "")], "s0", "no standby that could is in rack r1 or zone z1"),
    ],
)
def test_standbys_are_preferred_by_rack_then_by_zone(places: list[tuple[str, str]], expected: str, detail: str) -> None:
    job = Job()
    job.boot()
    for index in range(3):
        job.connect(msgspec.structs.replace(hello(f"n{index}"), rack=f"r{index}", zone=f"z{index}"))
        job.deliver(attach(w(f"n{index}")))
    for index in range(3):
        job.deliver(msg.Entered(worker=w(f"n{index}"), generation=1, applied=0))
    job.step(1)
    for index, (rack, zone) in enumerate(places):
        add_standby(job, f"s{index}", rack=rack, zone=zone)
    job.lose("n1")
    job.report("n0", 1)
    job.report("n2", 1)
    assert members(job) == (w("n0"), w(expected), w("n2"))
    for name in ("n0", expected, "n2"):
        job.deliver(msg.Entered(worker=w(name), generation=2, applied=1))
    job.step(2, "n0", expected, "n2", generation=2)
    assert job.emitted(ev.NodeMoved)[0].detail == detail


def in_zones() -> Job:
    """Return a job of three nodes in different zones that have committed step 1."""
    job = Job()
    job.boot()
    for index in range(3):
        job.connect(msgspec.structs.replace(hello(f"n{index}"), zone=f"z{index}"))
        job.deliver(attach(w(f"n{index}")))
    for index in range(3):
        job.deliver(msg.Entered(worker=w(f"n{index}"), generation=1, applied=0))
    job.step(1)
    return job


def take_over(job: Job, *names: str, generation: int, standbys: tuple[str, ...] = ()) -> None:
    """Start another coordinator; connect these nodes and standbys, each in the zone of the digit in its name."""
    job.boot(takeover=True)
    for name in names:
        kept = (attach(w(name)), msg.Entered(worker=w(name), generation=generation, applied=1))
        job.connect(msgspec.structs.replace(hello(name, kept=kept), zone=f"z{name[-1]}"))
    for name in standbys:
        kept = (attach(w(name)), msg.Warmed(worker=w(name), seconds=0.5))
        job.connect(msgspec.structs.replace(hello(name, kept=kept), standby=True, zone=f"z{name[-1]}"))


def test_a_new_coordinator_knows_the_zone_of_a_lost_node() -> None:
    job = in_zones()
    add_standby(job, "s0", zone="z0")
    add_standby(job, "s1", zone="z1")
    take_over(job, "n0", "n2", generation=1, standbys=("s0", "s1"))
    for _ in range(20):
        job.tick(0.2)
        for name in ("n0", "n2", "s0", "s1"):
            job.deliver_from(name, msg.Heartbeat())
    assert [event.node for event in job.events if isinstance(event, ev.FailureDetected)] == ["n1"]
    job.report("n0", 1)
    job.report("n2", 1)
    assert members(job) == (w("n0"), w("s1"), w("n2"))


@pytest.mark.parametrize("later", [False, True])
def test_a_standby_that_joins_for_a_missing_node_is_from_its_zone(later: bool) -> None:
    job = in_zones()
    job.lose("n1")
    job.report("n0", 1)
    job.report("n2", 1)
    for name in ("n0", "n2"):
        job.deliver(msg.Entered(worker=w(name), generation=2, applied=1))
    assert members(job) == (w("n0"), w("n2"))
    if later:
        take_over(job, "n0", "n2", generation=2)
    for name in ("s0", "s1"):
        add_standby(job, name, zone=f"z{name[-1]}", warm=False)
    for name in ("s0", "s1"):  # both become warm while the step passes
        job.machine.context.standbys.on_warmed(job.machine.members.nodes[name], msg.Warmed(worker=w(name), seconds=0.5))
    job.step(2, "n0", "n2", generation=2)
    assert list(job.machine.members.standbys) == ["s0"], "s1 is of the zone of n1"
    assert job.machine.record.places == {"n1": ("", "z1"), "n0": ("", "z0"), "n2": ("", "z2")}


def test_a_new_coordinator_knows_a_promoted_standby() -> None:
    job = beside()
    job.lose("n1")
    job.report("n0", 1)
    job.report("n2", 1)
    job.boot(takeover=True)
    kept = (attach(w("s0")), msg.Warmed(worker=w("s0"), seconds=0.5), msg.Begun(worker=w("s0"), generation=2))
    job.connect(msgspec.structs.replace(hello("s0", kept=kept), standby=True))
    assert not job.machine.members.standbys


@pytest.mark.parametrize(("policy", "begins_with"), [("wait", 3), ("shrink", 1)])
def test_a_job_with_the_wait_policy_restarts_with_its_previous_size(policy: Policy, begins_with: int) -> None:
    """All nodes are lost, but a checkpoint exists: the first returning node trains alone only with shrink."""
    job = Job(spec=JobSpec(recovery=RecoverySpec(on_node_failure=policy))).start()
    job.step(1)
    job.machine.transaction.change(checkpoints=(KnownCheckpoint(step=1, name="step-1"),))
    names = ("n0", "n1", "n2")
    for name in names:
        job.lose(name)
    for place, name in enumerate(names, start=1):
        job.tick(0.5)
        job.connect(msgspec.structs.replace(hello(name), session="cafecafe", agent_pid=777))
        job.deliver(attach(w(name, "b")))
        job.tick(0.5)
        assert (job.machine.record.generation > 1) == (place >= begins_with)
        if place < begins_with:
            assert job.machine.need_reporter.need is not None
            assert job.machine.need_reporter.need.nodes == begins_with - place
    assert len(members(job)) == begins_with


def test_a_standby_continues_alone_or_the_job_fails_without_members() -> None:
    job = beside()
    for name in ("n0", "n1", "n2"):
        job.lose(name)
    job.tick(0.1)
    assert not job.machine.members.standbys
    plan = job.machine.record.plan
    assert job.machine.record.outcome == "failed" or (plan is not None and plan.workers == (w("s0"),))


def test_a_warm_standby_cannot_start_a_job_with_its_void_state() -> None:
    job = Job().start()
    add_standby(job, "s0")
    for name in ("n0", "n1", "n2"):
        job.lose(name)
    assert job.machine.record.plan is None
    assert w("s0") not in job.orders(msg.Begin), "its state is void"
    job.connect(msgspec.structs.replace(hello("s0", session="2" * 8), standby=True))
    job.deliver(attach(w("s0", "b")))
    assert members(job) == (w("s0", "b"),)


def drained(job: Job) -> None:
    job.feed(Drain(("n1",)))
    job.step(2)
    for name in ("n0", "n1", "n2"):
        job.report(name, 2)


def test_a_warm_standby_joins_next_to_a_drained_node_and_replaces_it() -> None:
    job = beside()
    job.feed(Drain(("n1",)))
    everybody = job.join("s0", step=2)
    job.step(3, *everybody, generation=2)
    for name in everybody:
        job.report(name, 3)
    assert members(job) == (w("n0"), w("s0"), w("n2"))
    assert [event.reason for event in job.emitted(ev.GenerationStarted)] == ["drain"]
    for name in ("n0", "s0", "n2"):
        job.deliver(msg.Entered(worker=w(name), generation=3, applied=3))
    job.step(4, "n0", "s0", "n2", generation=3)
    (moved,) = job.emitted(ev.NodeMoved)
    assert (moved.from_node, moved.to_node, moved.reason) == ("n1", "s0", "drain")
    assert job.machine.record.wanted == 3


def test_a_node_drained_without_a_warm_standby_leaves_no_open_rank() -> None:
    job = beside(warm=False)
    drained(job)
    assert members(job) == (w("n0"), w("n2"))
    for name in ("n0", "n2"):
        job.deliver(msg.Entered(worker=w(name), generation=2, applied=2))
    job.deliver(msg.Warmed(worker=w("s0"), seconds=0.5))
    job.tick(0.5)
    assert job.machine.record.pending is None


def test_draining_a_standby_does_not_reduce_the_wanted_nodes() -> None:
    job = beside()
    job.feed(Drain(("s0",)))
    assert [one.node for one in job.machine.record.drained] == ["s0"]
    assert not job.emitted(ev.NodeLeft), "it was never a member of the job"
    assert job.machine.record.wanted == 3
    assert not job.machine.members.standbys
