"""Tests that a pool's job trains with at most the granted number of nodes; other nodes are standbys."""

from __future__ import annotations

import msgspec
import pytest
from machinery import attach, hello, w
from pooled_job import Reserved, reserved

from holdfast.coordination.grants import select_surplus, update_roles
from holdfast.coordination.inputs import MoveNodes
from holdfast.protocol.events import NodeLeft, NodesJoined
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.pool.grants import Held, HeldGrant


def _most_that_train(job: Reserved) -> int:
    """Return the largest number of nodes that the job's record counted as training."""
    return max(record.held.training for record in job.records if record.held is not None)


def _begun_by_a_standby(*here: str) -> Reserved:
    """Return a job restarted by the standby alone, after all processes failed before the first step.

    Args:
        here: the members that have reconnected without a process.
    """
    job = reserved().train(warm=False, steps=0)
    for node in ("n0", "n1"):
        job.deliver_from(node, msg.WorkerDown(worker=w(node), kind=FailureKind.PROCESS_EXIT, exit_code=1, detail=""))
    for node in here:
        job.connect(msgspec.structs.replace(hello(node), grant={"n0": 1, "n1": 2}[node]))
    job.connect(msgspec.structs.replace(hello("s0"), grant=3, standby=True))
    job.deliver(attach(w("s0", "b")))
    assert job.members == (w("s0", "b"),)
    return job


@pytest.mark.parametrize("here", [("n0", "n1"), ()])
def test_a_node_that_a_standby_has_replaced_counts_as_a_standby(here: tuple[str, ...]) -> None:
    job = _begun_by_a_standby(*here)
    assert job.held.waiting == {2}
    assert job.reports[-1].standbys == {2}
    assert _most_that_train(job) == 2, "the pool would recall a node for the third one"
    if not here:
        job.connect(msgspec.structs.replace(hello("n1"), grant=2))
    assert list(job.machine.members.standbys) == ["n1"]


def test_a_connected_node_keeps_its_role_rather_than_an_absent_one() -> None:
    assert _begun_by_a_standby("n1").held.waiting == {1}


def test_a_node_that_a_standby_has_replaced_does_not_join() -> None:
    job = _begun_by_a_standby("n0", "n1")
    job.deliver(msg.Entered(worker=w("s0", "b"), generation=job.machine.record.generation, applied=0))
    for node in ("n0", "n1"):
        job.deliver(attach(w(node, "b")))
    job.tick(0.2)
    pending = job.machine.record.pending
    assert pending is not None
    assert set(pending.workers) == {w("s0", "b"), w("n0", "b")}
    assert list(job.machine.members.standbys) == ["n1"]
    assert not [event for event in job.events if isinstance(event, NodesJoined) and "n1" in event.names][1:]


def test_a_node_that_the_pool_promotes_joins_again() -> None:
    job = _begun_by_a_standby("n0", "n1")
    job.shares(standbys=(), called=("n1",))
    assert job.held.waiting == frozenset()
    assert job.held.training == job.held.places == 3


def test_a_node_granted_for_a_lost_one_is_a_standby_if_a_standby_was_faster() -> None:
    """The pool received the loss before the standby replaced the node, and grants another node."""
    job = reserved().train()
    job.lose("n1")
    job.shares(n0=1, s0=3, n2=4)
    job.report("n0", 1)
    assert job.members == (w("n0"), w("s0"))
    assert job.held.waiting == {4}
    job.comes("n2", 4)
    assert list(job.machine.members.standbys) == ["n2"], "its grant says that it waits"
    assert job.held.waiting == {4}


def test_a_promoted_standby_that_reconnects_by_a_standby_grant_is_a_standby() -> None:
    """It was lost while it joined next to the draining node; it warms up and joins again."""
    job = reserved().train()
    job.feed(MoveNodes(("n1",)))
    assert job.machine.record.pending is not None
    job.lose("s0")
    job.shares(n0=1, n1=2, s0=4, standbys=(4,))
    job.connect(msgspec.structs.replace(hello("s0"), grant=4, session="0000000f"))
    job.deliver(attach(w("s0", "b")))
    assert list(job.machine.members.standbys) == ["s0"]
    (entry,) = job.machine.record.standbys
    assert not entry.promoted
    assert _most_that_train(job) == 2


def test_no_standby_replaces_a_lost_node_that_was_recalled() -> None:
    job = reserved().train()
    job.shares(leaving=(2,))
    job.lose("n1")
    job.report("n0", 1)
    assert job.members == (w("n0"),)
    assert job.held.waiting == {3}


def test_a_recalled_standby_with_ranks_counts_as_a_standby_until_the_moved_node_waits() -> None:
    """The pool counts it as a standby until it learns that the moved node waits."""
    job = reserved().train()
    job.feed(MoveNodes(("n1",)))
    job.join("s0", step=2)
    job.step(3, "n0", "n1", "s0", generation=2)
    for node in ("n0", "n1", "s0"):
        job.report(node, 3)
    job.shares(leaving=(3,))
    assert job.held.waiting == {3}, "n1 may still be needed"
    for node in ("n0", "s0"):
        job.deliver(msg.Entered(worker=w(node), generation=3, applied=3))
    job.step(4, "n0", "s0", generation=3)
    job.step(5, "n0", "s0", generation=3)
    assert job.held.waiting == {2}


def test_a_joined_node_that_becomes_a_standby_is_emitted_as_left() -> None:
    job = reserved().train()
    job.shares(n0=1, n1=2, s0=3, n2=4, n3=5)
    job.comes("n2", 4)
    job.comes("n3", 5)
    departures = job.machine.context.draining
    departures.set_aside("n2")
    departures.set_aside("n3")
    job.tick(1.0)
    told = [event for event in job.events if isinstance(event, NodesJoined | NodeLeft)][-2:]
    assert [type(event) for event in told] == [NodesJoined, NodeLeft]
    assert isinstance(told[0], NodesJoined)
    assert told[0].names == ("n2",), "n3 was not reported before"
    assert told[1] == NodeLeft(**{**msgspec.structs.asdict(told[1]), "node": "n2", "reason": "moved"})


def test_a_member_counts_as_training_before_it_reconnects_to_a_new_coordinator() -> None:
    """The node that it replaced returns first, without its process, and is a standby at once."""
    job = reserved().train()
    job.feed(MoveNodes(("n1",)))
    job.join("s0", step=2)
    job.step(3, "n0", "n1", "s0", generation=2)
    for node in ("n0", "n1", "s0"):
        job.report(node, 3)
    job.boot(takeover=True)
    assert job.held.waiting == {3}
    job.connect(msgspec.structs.replace(hello("n1"), grant=2))
    assert not job.machine.record.leaving
    assert "s0" not in job.machine.members.nodes
    assert job.held.waiting == {2}


def _held(places: int | None, **standby: bool) -> Held:
    grants = {
        node: HeldGrant(number=number, since=0.0, came=True, standby=waits)
        for number, (node, waits) in enumerate(standby.items(), 1)
    }
    return Held(submission=1, grants=grants, places=places)


def test_roles_stay_if_a_moved_node_takes_its_rank_back() -> None:
    """A moved node takes its rank back in the same transaction, so both roles stay."""
    held = update_roles(_held(2, a=False, b=False, s=True), {"a": False, "s": False}, {"a": "s"})
    assert held.waiting == {1}


def test_the_surplus_nodes_become_standbys() -> None:
    held = _held(2, a=False, b=False, c=False, d=False, s=True)
    assert select_surplus(held, ["s", "d", "c", "b"]) == ["d", "c"]
    assert select_surplus(msgspec.structs.replace(held, places=4), ["d"]) == []


def test_a_record_without_a_number_of_places_has_no_surplus() -> None:
    assert select_surplus(_held(None, a=False), ["a"]) == []


def test_a_standby_that_leaves_before_it_has_ranks_counts_as_a_standby() -> None:
    """Another standby joins instead: three nodes train for a moment, and one of them will leave."""
    job = reserved()
    job.boot()
    standbys = {"s0": 3, "s1": 4, "s2": 5}
    job.shares(standbys=(3, 4, 5), n0=1, n1=2, **standbys)
    for node, grant in (("n0", 1), ("n1", 2)):
        job.comes(node, grant)
    for node, grant in standbys.items():
        job.connect(msgspec.structs.replace(hello(node, session=f"{grant:08x}"), grant=grant, standby=True))
        job.deliver(attach(w(node)))
    for node in ("n0", "n1"):
        job.deliver(msg.Entered(worker=w(node), generation=1, applied=0))
    job.deliver(msg.Warmed(worker=w("s0"), seconds=0.5))
    job.step(1, "n0", "n1")
    job.feed(MoveNodes(("n1",)))
    job.join("s0", step=2)
    job.deliver_from("s0", msg.EndNotice(grace_s=600.0))
    job.join(step=3)
    job.deliver(msg.Warmed(worker=w("s1"), seconds=0.5))
    assert [(one.node, one.beside) for one in job.machine.record.leaving] == [("n1", "s1"), ("s0", "")]
    assert job.held.waiting == {3, 4, 5}
    assert _most_that_train(job) == 2
