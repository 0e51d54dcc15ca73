"""Tests of the actions for a node that computes slower than the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import msgspec
from machinery import Job, applied, attach, commit, hello, w

from holdfast.coordination.generations.planner import divide_micro_batches
from holdfast.coordination.hang_detection.slow_nodes import SlowNodes
from holdfast.coordination.hang_detection.straggler_response import AVOID_S, REPORT_AGAIN_S
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.messages import any_side as msg

Policy = Literal["ask", "move", "off"]
NODES = ("n0", "n1", "n2")


def started(policy: Policy, *standbys: str) -> Job:
    job = Job(spec=JobSpec(recovery=RecoverySpec(stragglers=policy))).start()
    job.step(1)
    for name in standbys:
        warm(job, name)
    return job


def warm(job: Job, standby: str) -> None:
    job.connect(msgspec.structs.replace(hello(standby), standby=True))
    job.deliver(attach(w(standby)))
    job.deliver(msg.Warmed(worker=w(standby), seconds=0.5))


def report_compute_times(
    job: Job, slow: str, times: int, *, factor: float = 1.3, nodes: tuple[str, ...] = NODES
) -> list[ev.StragglerFound]:
    """Send each node's compute times `times` times; return the stragglers found."""
    before = len(job.events)
    for _ in range(times):
        for node in nodes:
            took = 0.5 * (factor if node == slow else 1.0)
            own = msg.OwnTimes(
                compute_s={w(node): took / 5}, computed={w(node): (5, took)}, slow={}, link_bytes_per_s={}
            )
            job.deliver_from(node, own)
    return [event for event in job.events[before:] if isinstance(event, ev.StragglerFound)]


def test_with_ask_a_straggler_is_reported_once_with_the_command() -> None:
    job = started("ask", "s0")
    assert report_compute_times(job, "", 20) == []
    (found,) = report_compute_times(job, "n1", 20)
    assert (found.node, found.action) == ("n1", "told")
    assert 1.25 < found.factor < 1.35
    assert "`holdfast move n1`" in found.why
    assert job.machine.record.leaving == ()
    job.now += REPORT_AGAIN_S
    assert len(report_compute_times(job, "n1", 2)) == 1, "the node is still slow"


def test_with_off_no_straggler_is_reported() -> None:
    job = started("off", "s0")
    assert report_compute_times(job, "n1", 40) == []


def test_a_straggler_replaced_by_a_standby_is_used_only_as_last_resort() -> None:
    job = started("move", "s0")
    report_compute_times(job, "", 20)
    (found,) = report_compute_times(job, "n1", 20)
    assert (found.node, found.action) == ("n1", "move")
    assert [(one.node, one.stays) for one in job.machine.record.leaving] == [("n1", True)]
    everybody = job.join("s0", step=2)
    job.step(3, *everybody, generation=2)
    for node in everybody:
        job.report(node, 3)
    now = ("n0", "s0", "n2")
    for node in now:
        job.deliver(msg.Entered(worker=w(node), generation=3, applied=3))
    job.step(4, *now, generation=3)
    assert job.machine.context.standbys.ready("n1")
    assert report_compute_times(job, "", 20, nodes=now) == []
    (found,) = report_compute_times(job, "n2", 20, nodes=now)
    assert (found.node, found.action) == ("n2", "told")
    assert "standby n1 was slow itself" in found.why
    job.lose("n0")
    job.report("s0", 4)
    job.report("n2", 4)
    plan = job.machine.record.plan
    assert plan is not None
    assert "n1" in {member.node for member in plan.members}, "a slow node is better than none"


def test_a_reported_straggler_is_moved_as_soon_as_a_standby_is_warm() -> None:
    job = started("move")
    report_compute_times(job, "", 20)
    assert [found.action for found in report_compute_times(job, "n1", 40)] == ["told"], "once"
    warm(job, "s0")
    assert [found.action for found in report_compute_times(job, "n1", 20)] == ["move"], "once"
    assert [(one.node, one.stays) for one in job.machine.record.leaving] == [("n1", True)]


def test_without_a_standby_the_report_contains_the_reason() -> None:
    job = started("move")
    report_compute_times(job, "", 20)
    (found,) = report_compute_times(job, "n1", 20)
    assert found.action == "told"
    assert "no standby is warm" in found.why
    assert [one.node for one in job.machine.record.slow] == ["n1"]
    job.machine.transaction.now += AVOID_S
    assert job.machine.context.replacements.slow == set()


def counts(job: Job) -> tuple[int, ...]:
    plan = job.machine.record.plan
    assert plan is not None
    return plan.counts


def take_effect(job: Job, step: int) -> int:
    """Build, arm and enter the pending plan of the same members; return its generation."""
    pending = job.machine.record.pending
    assert pending is not None
    assert {member.node for member in pending.members} == set(NODES)
    for node in NODES:
        job.deliver(msg.Prepared(worker=w(node), generation=pending.generation))
    before = job.machine.transaction.generation
    for node in NODES:
        job.deliver(applied(w(node), before, step, commit(1.0, msg.Flag.SWAP)))
    for node in NODES:
        job.deliver(msg.Entered(worker=w(node), generation=pending.generation, applied=step))
    return pending.generation


def test_without_a_standby_a_straggler_computes_fewer_micro_batches() -> None:
    job = started("move")
    report_compute_times(job, "", 20)
    (found,) = report_compute_times(job, "n1", 20, factor=3.0)
    assert (found.node, found.action) == ("n1", "fewer")
    assert "no standby is warm" in found.why
    assert counts(job) == (), "the counts change only when all members have the plan"
    generation = take_effect(job, 2)
    assert counts(job) == (3, 1, 2)
    assert report_compute_times(job, "n1", 40, factor=3.0) == []
    assert job.machine.record.pending is None, "once"
    job.step(3, generation=generation)
    assert report_compute_times(job, "", 60) == []
    assert take_effect(job, 4) > generation
    assert counts(job) == ()
    assert job.machine.record.relieved == {}


def test_a_straggler_computes_fewer_micro_batches_after_another_node_fails() -> None:
    job = started("move")
    report_compute_times(job, "", 20)
    report_compute_times(job, "n1", 20, factor=3.0)
    generation = take_effect(job, 2)
    job.lose("n0")
    for node in ("n1", "n2"):
        job.report(node, 2)
    plan = job.machine.record.plan
    assert plan is not None
    assert plan.generation > generation
    assert dict(zip((member.node for member in plan.members), plan.counts, strict=True)) == {"n1": 1, "n2": 5}


def test_a_recorded_straggler_stays_slow_until_measured_fast() -> None:
    slow = SlowNodes()
    slow.keep_nodes(NODES, {"n1": 3.0, "gone": 2.0})
    assert slow.slow_nodes == {"n1": 3.0}
    for _ in range(30):
        for node in NODES:
            slow.on_report(node, {w(node): (5, 1.5 if node == "n1" else 0.5)})
        assert slow.slow_nodes.keys() == {"n1"}
    for _ in range(60):
        for node in NODES:
            slow.on_report(node, {w(node): (5, 0.5)})
    assert slow.slow_nodes == {}


def test_a_straggler_with_fewer_micro_batches_is_moved_once_a_standby_is_warm() -> None:
    job = started("move")
    report_compute_times(job, "", 20)
    report_compute_times(job, "n1", 20, factor=3.0)
    take_effect(job, 2)
    warm(job, "s0")
    assert [found.action for found in report_compute_times(job, "n1", 20, factor=3.0)] == ["move"]
    assert counts(job) == (3, 1, 2), "it computes fewer until it leaves"


def test_micro_batches_are_not_redistributed_if_no_step_gets_shorter() -> None:
    job = started("move")
    report_compute_times(job, "", 20)
    (found,) = report_compute_times(job, "n1", 20, factor=1.2)
    assert found.action == "told"
    assert job.machine.record.pending is None


def test_recorded_stragglers_are_ignored_if_the_policy_is_off() -> None:
    job = started("move")
    report_compute_times(job, "", 20)
    report_compute_times(job, "n1", 20, factor=3.0)
    take_effect(job, 2)
    record, config = job.machine.record, job.machine.config
    names = [w(node) for node in NODES]
    assert divide_micro_batches(record, names, config) == (3, 1, 2)
    off = JobSpec(recovery=RecoverySpec(stragglers="off"))
    assert divide_micro_batches(record, names, replace(config, spec=off)) == ()
