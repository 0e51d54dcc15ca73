"""Tests of a pool's standby in a job: it waits by its grant, replaces a lost node, or joins if the pool wants it."""

from __future__ import annotations

import pytest
from machinery import w
from pooled_job import reserved

from holdfast.coordination.inputs import MoveNodes
from holdfast.protocol.job_spec import ExperimentSpec, RecoverySpec
from holdfast.protocol.messages import any_side as msg


def test_a_node_with_a_standby_grant_is_a_standby_and_roles_are_reported() -> None:
    job = reserved().train()
    assert job.held.waiting == {3}
    assert list(job.machine.members.standbys) == ["s0"]
    job.shares()
    assert (job.reports[-1].standbys, job.reports[-1].trains) == ({3}, {1, 2})


def test_a_standby_trains_in_the_same_write_that_returns_the_lost_node() -> None:
    job = reserved().train()
    job.lose("n1")
    assert job.held.numbers == {1, 2, 3}
    job.report("n0", 1)
    assert job.members == (w("n0"), w("s0"))
    assert (job.held.numbers, job.held.waiting) == ({1, 3}, frozenset())
    (told,) = job.reports
    assert (told.held, told.standbys) == ({1, 3}, frozenset())


def test_a_cold_standby_that_the_pool_promotes_joins() -> None:
    job = reserved().train(warm=False)
    job.lose("n1")
    job.report("n0", 1)
    assert job.members == (w("n0"),)
    assert job.held.waiting == {3}
    job.deliver(msg.Entered(worker=w("n0"), generation=2, applied=1))
    job.shares(standbys=(), called=("s0",), n0=1, s0=3)
    assert job.held.waiting == frozenset()
    assert not job.machine.members.standbys
    job.tick(0.2)
    pending = job.machine.record.pending
    assert pending is not None
    assert pending.workers == (w("n0"), w("s0"))


def test_an_older_message_of_the_pool_makes_no_member_a_standby() -> None:
    job = reserved().train()
    job.lose("n1")
    job.report("n0", 1)
    job.shares(n0=1, s0=3)  # the pool does not know about the loss yet
    assert job.held.waiting == frozenset()
    assert not job.machine.members.standbys


def test_a_standby_promoted_before_it_connects_is_a_regular_node() -> None:
    job = reserved()
    job.boot()
    job.shares()
    job.shares(standbys=(), called=("s0",))
    job.comes("s0", 3, standby=True)
    assert not job.machine.members.standbys
    assert job.held.waiting == frozenset()


def test_a_standby_promoted_before_the_job_begins_reconnects_as_a_regular_node() -> None:
    job = reserved()
    job.boot()
    job.shares()
    job.comes("s0", 3, standby=True)
    job.shares(standbys=(), called=("s0",))
    assert job.sent(msg.Refused)[0].retry
    job.comes("s0", 3, standby=True)
    assert not job.machine.members.standbys


def test_the_grant_decides_the_role_and_not_the_nodes_own_setting() -> None:
    job = reserved()
    job.boot()
    job.shares(standbys=())
    job.comes("s0", 3, standby=True)
    assert not job.machine.members.standbys


def test_no_standby_replaces_a_recalled_node() -> None:
    job = reserved().train()
    job.shares(leaving=(2,))
    job.step(2, "n0", "n1")
    job.report("n0", 2)
    job.report("n1", 2)
    assert job.members == (w("n0"),)
    assert job.held.waiting == {3}
    job.deliver(msg.Entered(worker=w("n0"), generation=2, applied=2))
    for step in (3, 4, 5):
        job.step(step, "n0", generation=2)
    assert job.held.numbers == {1, 3}
    assert job.held.waiting == {3}, "the rank is not empty"
    assert job.machine.record.pending is None


def test_a_standby_replaces_a_lost_node_although_a_recalled_node_cannot_leave_yet() -> None:
    job = reserved(experiments=ExperimentSpec(static_experts=True, ep_size=2)).train()
    job.shares(leaving=(2,))
    job.step(2, "n0", "n1")
    assert job.machine.context.interruption.stop is None, "without n1 the nodes are too few for all experts"
    job.lose("n0")
    job.report("n1", 2)
    assert set(job.members) == {w("n1"), w("s0")}
    assert job.held.numbers == {2, 3}


@pytest.mark.parametrize("policy", ["standby", "auto", "wait"])
def test_a_recalled_node_and_its_joined_replacement_count_as_one_node(
    policy: str,
) -> None:
    """The pair of the recalled node and its replacement counted twice."""
    job = reserved(recovery=RecoverySpec(on_node_failure=policy)).train()
    job.feed(MoveNodes(("n1",)))
    assert job.join("s0", step=2) == ("n0", "n1", "s0")
    grants = {"n0": 1, "n1": 2, "s0": 3, "s1": 4}
    job.shares(standbys=(3, 4), **grants)
    job.comes("s1", 4, standby=True)
    job.deliver(msg.Warmed(worker=w("s1"), seconds=0.5))
    job.shares(standbys=(3, 4), leaving=(2,), **grants)
    assert job.held.places == 1
    job.lose("n0")
    for node in ("n1", "s0"):
        job.report(node, 2)
    assert job.machine.context.interruption.stop is None
    assert w("s1") not in job.members


def test_a_job_that_waits_for_lost_nodes_continues_with_a_recalled_one_until_that_leaves() -> None:
    job = reserved(recovery=RecoverySpec(on_node_failure="wait")).train()
    job.lose("s0")
    job.shares(standbys=(), leaving=(2,), n0=1, n1=2)
    job.lose("n0")
    job.report("n1", 1)
    assert job.machine.context.interruption.stop is None
    assert job.members == (w("n1"),)


def test_a_recalled_standby_leaves_at_once() -> None:
    job = reserved().train()
    job.shares(leaving=(3,))
    job.tick(0.2)
    assert job.sent(msg.EndNode)
    assert job.held.numbers == {1, 2}


def test_a_lost_standby_is_returned_without_an_interruption() -> None:
    job = reserved().train()
    job.lose("s0")
    assert job.held.numbers == {1, 2}
    assert job.machine.context.interruption.stop is None
