"""Tests of the pool's state machine: the owner of each node, and the messages needed to change it."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from played_pool import PlayedPool

from holdfast.coordination.inputs import StoreBack, Tick
from holdfast.coordination.pool.inputs import ForgetNode, JobConnected, JobMessage, NodeMessage, ResumeJob, SuspendJob
from holdfast.coordination.pool.instructions import (
    DisconnectNode,
    EmitPool,
    PersistPool,
    PoolInstruction,
    SendToJob,
    SendToNode,
    StartCoordinator,
    StopCoordinator,
    StopOutdatedPool,
)
from holdfast.errors import RefusedError, UnreachableError
from holdfast.protocol.messages.pool import LeavePool, NodeAlive, NodeState, PoolHello, PoolRefusal
from holdfast.protocol.names import PROTOCOL
from holdfast.protocol.pool import events as ev
from holdfast.protocol.pool.sharing import JobState


def test_a_single_job_receives_all_nodes() -> None:
    pool = PlayedPool(nodes=3)
    pool.submit("one")
    assert pool.nodes_of("one") == {"n1", "n2", "n3"}
    assert {pool.whose(node) for node in ("n1", "n2", "n3")} == {"one"}
    assert sorted(pool.job_told["one"].grants) == ["n1", "n2", "n3"]


def test_a_grant_is_recorded_before_it_is_sent() -> None:
    """`PlayedPool` checks the order; this test checks that a sent grant is in the record."""
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    assert pool.node_told[1].grant == pool.record.grants["n1"].number == pool.job_told["one"].grants["n1"]


def test_a_node_changes_its_job_only_after_it_is_returned() -> None:
    pool = PlayedPool(nodes=4)
    pool.submit("one")
    pool.submit("two")
    moved = pool.leaving("one")
    assert len(moved) == 2
    assert pool.nodes_of("two") == set()
    assert {pool.whose(node) for node in moved} == {"one"}, "a node keeps its job until it has left"
    pool.stands("one")
    assert pool.nodes_of("two") == moved
    assert {pool.whose(node) for node in moved} == {"two"}


def test_a_job_state_older_than_a_grant_does_not_affect_it() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    heard = pool.job_told["one"].version
    pool.come("n2")
    assert pool.nodes_of("one") == {"n1", "n2"}
    submission = pool.job_told["one"].submission
    pool.feed(JobMessage("one", JobState(submission=submission, heard=heard, held=frozenset({1}))))
    assert pool.nodes_of("one") == {"n1", "n2"}, "the job had not received the second grant"


def test_a_job_that_loses_a_node_receives_a_new_grant_for_it() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one")
    first = pool.record.grants["n2"].number
    pool.stands("one", without={"n2"})
    assert pool.record.grants["n2"].number > first
    assert pool.of_kind(ev.NodeReleased)[-1].by == "job"


def test_a_disconnected_node_keeps_its_grant_until_its_job_loses_it() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one")
    pool.go("n2")
    assert pool.nodes_of("one") == {"n1", "n2"}
    pool.stands("one", without={"n2"})
    assert pool.nodes_of("one") == {"n1"}
    assert "n2" not in pool.record.grants
    pool.come("n2", stands=NodeState(runs=2))
    assert pool.nodes_of("one") == {"n1", "n2"}


def test_a_restarted_agent_starts_without_a_grant() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    pool.go("n1")
    pool.come("n1", session="b")
    released = pool.of_kind(ev.NodeReleased)
    assert [(event.grant, event.by) for event in released] == [(1, "node")]
    assert pool.record.grants["n1"].number == 2
    assert pool.record.grants["n1"].session == "b"


def test_a_reconnected_node_unaware_of_its_grant_receives_it_again() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    pool.go("n1")
    pool.come("n1")
    assert pool.node_told[2].grant == 1
    assert pool.of_kind(ev.NodeReleased) == []


def test_a_node_reports_the_end_of_its_grant() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    pool.says("n1", runs=1)
    pool.says("n1", ended=1)
    assert pool.record.grants["n1"].number == 2


def test_a_second_node_with_the_same_name_is_refused() -> None:
    pool = PlayedPool(nodes=1)
    pool.come("n1", session="c")
    assert pool.closed == [2]
    assert pool.record.nodes["n1"].session == "a"


def test_a_node_of_another_version_is_refused_and_keeps_its_grant() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    pool.go("n1")
    out = pool.feed(NodeMessage(9, PoolHello(node="n1", session="b", protocol=PROTOCOL + 1)))
    why = f"node n1 speaks version {PROTOCOL + 1}, and the pool {PROTOCOL}: install the same holdfast"
    assert out == [SendToNode(9, PoolRefusal(why=why)), DisconnectNode(9)]
    assert pool.record.grants["n1"].number == 1


def test_a_new_connection_of_a_node_replaces_its_old_one() -> None:
    pool = PlayedPool(nodes=1)
    pool.come("n1")
    assert pool.closed == [1]
    pool.submit("one")
    assert pool.node_told[2].job == "one"


def test_a_silent_node_is_lost_after_its_lease_unless_the_pool_slept() -> None:
    pool = PlayedPool(nodes=2, lease_s=3.0)
    pool.tick(60.0)
    assert pool.closed == [], "the pool itself was suspended"
    for _ in range(4):
        pool.tick(0.9)
        pool.feed(NodeMessage(2, NodeAlive()))
    assert pool.closed == [1]


def test_a_node_that_leaves_is_forgotten() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one")
    pool.feed(NodeMessage(1, LeavePool()))
    assert sorted(pool.record.nodes) == ["n2"]
    assert pool.nodes_of("one") == {"n2"}
    assert pool.of_kind(ev.NodeForgotten)[0].node == "n1"


def test_a_user_can_forget_only_a_disconnected_unused_node() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one")
    with pytest.raises(UnreachableError, match="there is no node 'n9': the nodes are n1, n2"):
        pool.feed(ForgetNode("n9"))
    with pytest.raises(RefusedError, match="node n1 is connected"):
        pool.feed(ForgetNode("n1"))
    pool.go("n1")
    with pytest.raises(RefusedError, match="node n1 is one of job one, which has not lost it"):
        pool.feed(ForgetNode("n1"))
    pool.stands("one", without={"n1"})
    pool.feed(ForgetNode("n1"))
    assert sorted(pool.record.nodes) == ["n2"]


def test_a_reserve_node_replaces_a_lost_node() -> None:
    pool = PlayedPool(nodes=4, reserve=1)
    pool.submit("one", most=8)
    assert pool.nodes_of("one") == {"n1", "n2", "n3"}
    pool.go("n1")
    pool.stands("one", without={"n1"})
    assert pool.nodes_of("one") == {"n2", "n3", "n4"}


def test_a_preemptible_job_is_suspended_and_resumed_later() -> None:
    pool = PlayedPool(nodes=4, reserve=1)
    pool.submit("loose", least=2, preemptible=True)
    pool.submit("firm", least=3, most=3)
    assert pool.state_of("loose") == "suspending"
    assert pool.job_told["loose"].wish == "suspend"
    pool.stands("loose", standing="suspended", without={"n1", "n2", "n3", "n4"})
    assert pool.state_of("loose") == "queued"
    assert len(pool.nodes_of("firm")) == 3
    assert pool.of_kind(ev.JobSuspended)[0].preempted
    pool.stands("firm", standing="finished")
    assert len(pool.nodes_of("loose")) == 4


def test_an_immediately_resumed_job_gets_another_coordinator() -> None:
    """The old coordinator is closed first; otherwise the new one would be closed and the job would have none."""
    pool = PlayedPool(nodes=2)
    pool.submit("one")
    pool.feed(SuspendJob("one"))
    pool.feed(ResumeJob("one"))
    told = pool.job_told["one"]
    over = JobState(submission=told.submission, heard=told.version, standing="suspended")
    out = pool.feed(JobMessage("one", over))
    assert [type(one) for one in out if isinstance(one, StartCoordinator | StopCoordinator)] == [
        StopCoordinator,
        StartCoordinator,
    ]


def test_queued_jobs_have_a_reason() -> None:
    pool = PlayedPool(nodes=4)
    pool.submit("one", least=3)
    pool.submit("two", least=2)
    pool.submit("three", least=1)
    assert pool.record.jobs["two"].why == "it needs 2 nodes, and 1 can be given"
    assert pool.record.jobs["three"].why == "two is before it: it has no time_limit"
    assert pool.of_kind(ev.PlanDecided)[-1].waiting.keys() == {"two", "three"}


def test_a_waiting_job_is_explained_with_sufficient_changes() -> None:
    pool = PlayedPool(nodes=4)
    pool.submit("one", least=3)
    pool.submit("two", least=2)
    assert pool.pool.explain("two") == ["1 more node", "if it asked for 1 node", "the end of one"]
    assert pool.pool.explain("one") == pool.pool.explain("three") == []


def test_an_ended_job_leaves_its_nodes_to_the_next_one() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one", least=2)
    pool.submit("two", least=2)
    assert pool.state_of("two") == "queued"
    pool.stands("one", standing="finished", why="completed")
    assert (pool.state_of("one"), pool.state_of("two")) == ("finished", "admitted")
    assert pool.nodes_of("two") == {"n1", "n2"}
    assert pool.of_kind(ev.JobEnded)[0].why == "completed"


def test_a_job_has_a_coordinator_from_its_admission_to_its_end() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    told = pool.job_told["one"]
    out = pool.restart()
    assert [one.job.name for one in out if isinstance(one, StartCoordinator)] == ["one"]
    over = JobState(submission=told.submission, heard=told.version, standing="failed", why="it raised")
    assert StopCoordinator("one", told.submission) in pool.feed(JobMessage("one", over))


def test_a_reconnected_job_receives_its_current_shares() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one")
    out = pool.feed(JobConnected("one"))
    assert [one.shares.grants.keys() for one in out if isinstance(one, SendToJob)] == [{"n1", "n2"}]
    assert not [one for one in out if isinstance(one, PersistPool)]


def test_messages_of_an_earlier_job_of_the_same_name_are_ignored() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    old = pool.job_told["one"]
    pool.stands("one", standing="finished")
    pool.submit("one")
    late = JobState(submission=old.submission, heard=old.version + 9, standing="failed")
    pool.feed(JobMessage("one", late))
    assert pool.state_of("one") == "admitted"
    assert pool.nodes_of("one") == {"n1"}


def test_a_job_with_a_snooze_time_grows_only_after_it() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one", snooze=60.0)
    pool.come("n2")
    assert pool.nodes_of("one") == {"n1"}
    pool.tick(59.0)
    assert pool.nodes_of("one") == {"n1"}
    pool.feed(NodeMessage(1, NodeAlive()))
    pool.feed(NodeMessage(2, NodeAlive()))
    pool.tick(1.5)
    assert pool.nodes_of("one") == {"n1", "n2"}


def test_nodes_refused_by_one_job_are_granted_to_another() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one", most=2)
    pool.stands("one", unfit={"n2"})
    assert pool.nodes_of("one") == {"n1"}
    pool.submit("two", most=1)
    assert pool.nodes_of("two") == {"n2"}


# ---- the server dies ----


def test_a_restarted_pool_decides_only_after_its_nodes_are_back() -> None:
    pool = PlayedPool(nodes=4, settle_s=5.0)
    pool.submit("one", most=2)
    pool.restart()
    pool.submit("two", most=2)
    assert pool.state_of("two") == "queued"
    before = pool.record.grants
    for number in range(1, 5):
        pool.come(f"n{number}")
    assert pool.state_of("two") == "admitted"
    assert {node: grant for node, grant in pool.record.grants.items() if grant.job == "one"} == before


def test_a_restarted_pool_waits_for_missing_nodes_only_for_a_limited_time() -> None:
    pool = PlayedPool(nodes=3, settle_s=5.0)
    pool.restart()
    pool.come("n1")
    pool.submit("one")
    assert pool.state_of("one") == "queued"
    for _ in range(11):
        pool.tick(0.5)
        pool.feed(NodeMessage(pool.connections["n1"], NodeAlive()))
    assert pool.nodes_of("one") == {"n1"}


def test_a_restart_of_the_pool_keeps_all_grants() -> None:
    pool = PlayedPool(nodes=6, settle_s=5.0)
    pool.submit("one")
    pool.submit("two")
    pool.stands("one")
    before = pool.record.grants
    pool.restart()
    for _ in range(30):
        pool.tick()
    assert pool.record.grants == before, "no node was connected, but all nodes still belong to their jobs"


def test_events_missing_in_the_journal_are_emitted_after_a_restart() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one")
    told = list(pool.events)
    outbox = pool.record.outbox
    assert len(outbox) > 2
    del pool.events[-2:]
    pool.restart()
    assert pool.events[: len(told)] == told


def test_a_truncated_journal_is_repaired_from_the_record() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one")
    pool.submit("two")
    first = pool.record.outbox[0].seq
    lost = pool.events[1:]
    del pool.events[1:]
    record = pool.record
    out = type(pool.pool)(pool.config, record, 1).start(pool.now, "", 1)
    events = [one.event for one in out if isinstance(one, EmitPool)]
    assert isinstance(events[0], ev.PoolJournalRepaired)
    assert (events[0].from_seq, events[0].to_seq, events[0].seq) == (2, first - 1, first - 1)
    assert [event.seq for event in events] == list(range(first - 1, len(lost) + 3))


def _refusals(said: list[PoolInstruction]) -> list[str]:
    return [one.message.why for one in said if isinstance(one, SendToNode) and isinstance(one.message, PoolRefusal)]


@pytest.mark.parametrize(
    ("hello", "knows"),
    [
        (PoolHello(node="n9", session="b", term=7, version=3), "version 3 of its record, by server 7"),
        (PoolHello(node="n9", session="b", stands=NodeState(runs=40)), "grant 40"),
        (PoolHello(node="n9", session="b", stands=NodeState(ended=2**64 - 1)), "grant 18446744073709551615"),
    ],
)
def test_a_node_ahead_of_the_record_is_refused_by_the_leading_server(hello: PoolHello, knows: str) -> None:
    """The node would ignore this pool's messages as stale; only a server that can still write may refuse it."""
    pool = PlayedPool(nodes=1)
    said = pool.feed(NodeMessage(99, hello))
    assert [type(one) for one in said] == [PersistPool, SendToNode, DisconnectNode]
    (why,) = _refusals(said)
    assert why.startswith(f"node n9 knows {knows} of a pool p that this one does not")
    assert "start the node's agent again" in why
    assert "n9" not in pool.record.nodes


IDENTITY = "0123456789abcdef"


def _from_backup(nodes: int = 1) -> PlayedPool:
    """Start a server from a backup of a pool's record, of version 10 by server 3."""
    pool = PlayedPool(nodes=nodes)
    pool.submit("one")
    record = replace(pool.record, identity=IDENTITY, term=3, version=10)
    pool.stored = msgspec.json.encode(record)
    pool.restart()
    return pool


def _stopped(said: list[PoolInstruction]) -> bool:
    """Return whether the server has ended itself without a message to a node."""
    assert not any(isinstance(one, SendToNode | DisconnectNode) for one in said if any(map(_stops, said)))
    return any(map(_stops, said))


def _stops(one: PoolInstruction) -> bool:
    return isinstance(one, StopOutdatedPool)


@pytest.mark.parametrize(
    "hello",
    [
        PoolHello(node="n9", session="b", term=3, version=11, identity=IDENTITY),
        PoolHello(node="n9", session="b", term=9, version=1, identity=IDENTITY),
        PoolHello(node="n9", session="b", stands=NodeState(runs=40), identity=IDENTITY),
    ],
)
def test_a_server_with_an_outdated_store_ends_without_stopping_nodes(hello: PoolHello) -> None:
    """The node ignores the server's messages as stale, and its workers continue training."""
    said = _from_backup().feed(NodeMessage(99, hello))
    assert isinstance(said[0], PersistPool), "a server with a successor ends at the write"
    assert _stopped(said)


def test_a_node_consistent_with_the_record_does_not_stop_the_server() -> None:
    hello = PoolHello(node="n9", session="b", term=3, version=10, identity=IDENTITY)
    assert not _stopped(_from_backup().feed(NodeMessage(99, hello)))


def test_a_node_ahead_of_a_settled_pool_stops_neither_server_nor_workers() -> None:
    pool = _from_backup()
    pool.feed(Tick(), after=pool.config.settle_s + 0.1)
    said = pool.feed(NodeMessage(99, PoolHello(node="n9", session="b", stands=NodeState(runs=40), identity=IDENTITY)))
    assert not _stopped(said)
    assert [one.message.stays for one in said if isinstance(one, SendToNode)] == [True]


def test_a_server_that_lost_its_store_ends_if_a_training_node_connects() -> None:
    pool = PlayedPool(nodes=0)
    hello = PoolHello(node="n9", session="b", stands=NodeState(runs=4), identity=IDENTITY)
    assert _stopped(pool.feed(NodeMessage(99, hello)))


def test_a_node_that_reports_an_unknown_grant_is_refused() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one")
    pool.stands("one")
    before = pool.record.grants
    said = pool.feed(NodeMessage(pool.connections["n1"], NodeState(ended=before["n1"].number + 5)))
    assert [type(one) for one in said] == [PersistPool, SendToNode, DisconnectNode]
    assert pool.record.grants == before, "the owner changes only after its job or a valid message of the node"
    assert pool.feed(NodeMessage(pool.connections["n1"], NodeState(ended=2))) == [], "the node is no longer heard"


def test_a_node_keeps_its_grant_after_a_server_restart() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    told = pool.node_told[pool.connections["n1"]]
    pool.restart()
    hello = PoolHello(node="n1", session="a", stands=NodeState(runs=told.grant), term=told.term, version=told.version)
    assert not _refusals(pool.feed(NodeMessage(50, hello)))
    assert pool.node_told[50].grant == told.grant


def test_a_full_pool_refuses_new_nodes() -> None:
    pool = PlayedPool(nodes=2, most_nodes=2)
    (why,) = _refusals(pool.feed(NodeMessage(99, PoolHello(node="n3", session="a"))))
    assert "the pool has 2 nodes, and accepts no more" in why
    pool.go("n2")
    pool.come("n2")
    assert "n2" in pool.pool.state.connected


def test_a_store_outage_is_recorded_in_the_journal_afterwards() -> None:
    pool = PlayedPool(nodes=1)
    pool.feed(StoreBack(60.5))
    assert [event.away_s for event in pool.of_kind(ev.PoolStoreReturned)] == [60.5]
