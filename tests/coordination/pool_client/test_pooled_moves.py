"""Tests of moves inside a pool's job: the pool sees one exchange of roles and never a surplus node."""

from __future__ import annotations

import msgspec
import pytest
from machinery import attach, hello, w
from pooled_job import Reserved, reserved

from holdfast.coordination.inputs import MoveNodes
from holdfast.errors import RefusedError
from holdfast.protocol.messages import any_side as msg


def _moving() -> Reserved:
    """Return a job in which the standby s0 has joined next to n1, which it replaces."""
    job = reserved().train()
    job.feed(MoveNodes(("n1",)))
    assert job.join("s0", step=2) == ("n0", "n1", "s0")
    return job


def _end_move(job: Reserved, *, waits: bool = True) -> None:
    """Make all continue without n1, a standby from then on that `waits` or is needed again at once."""
    job.step(3, "n0", "n1", "s0", generation=2)
    for node in ("n0", "n1", "s0"):
        job.report(node, 3)
    for node in ("n0", "s0"):
        job.deliver(msg.Entered(worker=w(node), generation=3, applied=3))
    for step in (4, 5):
        job.step(step, "n0", "s0", generation=3)
    assert list(job.machine.members.standbys) == (["n1"] if waits else [])


def test_the_roles_of_both_nodes_change_in_one_write() -> None:
    job = _moving()
    _end_move(job)
    roles = [record.held.waiting for record in job.records if record.held is not None and record.held.waiting]
    assert list(dict.fromkeys(roles)) == [frozenset({3}), frozenset({2})]
    assert job.machine.record.wanted == 2


def test_the_roles_stay_when_another_coordinator_takes_over_during_the_move() -> None:
    job = _moving()
    job.boot(takeover=True)
    job.tick(0.1)
    assert job.held.waiting == {3}


@pytest.mark.parametrize("lost", ["n1", "s0"])
def test_after_a_loss_during_a_move_two_nodes_count_as_training(lost: str) -> None:
    job = _moving()
    job.lose(lost)
    for node in {"n0", "n1", "s0"} - {lost}:
        job.report(node, 2)
    stays = {"n1": 3, "s0": 2}[lost]
    assert (job.held.numbers, job.held.waiting) == ({1, stays}, frozenset())
    held = [record.held for record in job.records if record.held is not None]
    assert max(len(one.numbers - one.waiting) for one in held) == 2


def test_a_node_promoted_during_its_move_joins_once_it_is_a_standby() -> None:
    """The job has one node fewer than the pool wants at that moment: the pool calls the node that has just moved."""
    job = _moving()
    job.shares(standbys=(), called=("s0",))
    assert job.held.waiting == frozenset(), "the pool wants a third node"
    _end_move(job)
    assert job.held.waiting == {2}
    job.shares(standbys=(), called=("n1",))
    assert job.held.waiting == frozenset()
    assert not job.machine.members.standbys
    job.tick(0.2)
    pending = job.machine.record.pending
    assert pending is not None
    assert set(pending.workers) == {w("n0"), w("n1"), w("s0")}


def test_a_promotion_takes_effect_once() -> None:
    """The pool repeats its message until the job answers; a node that has moved since then still waits."""
    job = _moving()
    job.shares(standbys=(), called=("s0",))
    _end_move(job)
    job.shares(standbys=())
    assert job.held.waiting == {2}
    job.shares(standbys=(), called=("n1",))
    job.shares(standbys=(2,))
    assert job.held.waiting == frozenset(), "the pool decided otherwise after the job's report"


def test_a_promoted_standby_that_is_unfit_is_not_reported_as_a_standby_again() -> None:
    """Otherwise the pool would call it repeatedly until its agent has ended."""
    job = reserved()
    job.boot()
    job.shares()
    job.connect(msgspec.structs.replace(hello("s0"), grant=3, standby=True))
    job.deliver(attach(w("s0"), model="another"))
    for node, grant in (("n0", 1), ("n1", 2)):
        job.comes(node, grant)
    for node in ("n0", "n1"):
        job.deliver(msg.Entered(worker=w(node), generation=1, applied=0))
    job.shares(standbys=(), called=("s0",))
    assert job.sent(msg.EndNode)
    job.step(1, "n0", "n1")
    assert list(job.machine.members.standbys) == ["s0"]
    assert job.held.waiting == frozenset()


def test_a_node_with_an_end_notice_and_its_standby_never_both_count_as_training() -> None:
    """The grace is too short for the standby to join first, so it replaces the node when that leaves."""
    job = reserved().train()
    job.deliver_from("n1", msg.EndNotice(grace_s=0.01))
    job.step(2, "n0", "n1")
    for node in ("n0", "n1"):
        job.report(node, 2)
    assert job.members == (w("n0"), w("s0"))
    assert job.held.waiting == {3}
    for node in ("n0", "s0"):
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=2))
    for step in (3, 4):
        job.step(step, "n0", "s0", generation=2)
    assert (job.held.numbers, job.held.waiting) == ({1, 3}, frozenset())


def test_the_standby_of_a_recalled_draining_node_trains() -> None:
    job = _moving()
    job.shares(leaving=(2,))
    assert job.held.waiting == frozenset(), "s0 trains, and n1 no longer counts"


def test_a_moved_node_that_joins_for_another_at_once_counts_as_a_standby() -> None:
    """The job's record never shows it as waiting: it is warm, and the second move has already started."""
    job = _moving()
    job.feed(MoveNodes(("n0",)))
    _end_move(job, waits=False)
    assert [(one.node, one.beside) for one in job.machine.record.leaving] == [("n0", "n1")]
    assert job.held.waiting == {2}


def test_a_node_that_joins_for_another_cannot_be_moved_before_it_has_its_ranks() -> None:
    job = _moving()
    with pytest.raises(RefusedError, match="node s0 joins to take the place of node n1: ask again"):
        job.feed(MoveNodes(("s0",)))


def test_a_node_that_waits_for_its_move_is_returned_if_it_is_recalled() -> None:
    """The standby is lost before it is warm. Without the recall, the node would wait for another standby."""
    job = reserved().train(warm=False)
    job.feed(MoveNodes(("n1",)))
    job.lose("s0")
    job.step(2, "n0", "n1")
    job.shares(leaving=(2,), n0=1, n1=2)
    job.tick(0.2)
    job.step(3, "n0", "n1")
    for node in ("n0", "n1"):
        job.report(node, 3)
    assert job.members == (w("n0"),)


@pytest.mark.parametrize("told_first", [True, False])
def test_no_standby_replaces_a_recalled_node_with_an_end_notice(
    told_first: bool,
) -> None:
    job = reserved().train(warm=not told_first)  # a warm standby would join next to n1 at once
    if told_first:
        job.deliver_from("n1", msg.EndNotice(grace_s=600.0))
    job.shares(leaving=(2,))
    if not told_first:
        job.deliver_from("n1", msg.EndNotice(grace_s=600.0))
    job.tick(0.2)
    job.step(2, "n0", "n1")
    for node in ("n0", "n1"):
        job.report(node, 2)
    assert job.members == (w("n0"),)
    assert job.held.waiting == {3}
