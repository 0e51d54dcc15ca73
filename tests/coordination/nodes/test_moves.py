"""Tests of moves: a node gives its rank to a standby and becomes a standby itself, in the same process."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, applied, attach, commit, hello, w

from holdfast.coordination.inputs import Drain, MoveNodes
from holdfast.coordination.instructions import Instruction
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.plan import DecisionKind


def add_standbys(job: Job, *names: str, warm: bool = True) -> None:
    for name in names:
        job.connect(msgspec.structs.replace(hello(name), standby=True))
        job.deliver(attach(w(name)))
        if warm:
            job.deliver(msg.Warmed(worker=w(name), seconds=0.5))


def with_standbys(*names: str) -> Job:
    """Return a job of nodes n0 to n2 that have committed step 1, with these warm standbys."""
    job = Job().start()
    job.step(1)
    add_standbys(job, *names)
    return job


ALL = ("n0", "n1", "n2")


def joins(job: Job, *standbys: str, step: int = 2) -> None:
    """Commit a step with which these standbys join, and another step with them."""
    everybody = job.join(*standbys, step=step)
    job.step(step + 1, *everybody, generation=job.machine.record.generation)


def moves(job: Job, *names: str, step: int = 3, to: tuple[str, ...] = ()) -> None:
    """Request moves of these nodes, make standbys join next to them, and make all report after that step."""
    standbys = to or tuple(job.machine.members.standbys)[: len(names)]
    job.feed(MoveNodes(names, to))
    joins(job, *standbys, step=step - 1)
    for node in members(job):
        job.report(node, step)


def gone_on(job: Job, step: int, *nodes: str, generation: int = 3) -> None:
    for node in nodes:
        job.deliver(msg.Entered(worker=w(node), generation=generation, applied=step - 1))
    said: list[Instruction] = []
    for node in nodes:
        job.step(step, node, generation=generation)
        said += job.last
    job.last = said


def members(job: Job) -> tuple[str, ...]:
    plan = job.machine.record.plan
    assert plan is not None
    return tuple(msg.node_of(worker) for worker in plan.workers)


def test_a_moved_node_swaps_roles_with_its_standby_and_stays_warm() -> None:
    job = with_standbys("s0")
    moves(job, "n1")
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (begun.reason, begun.decision, members(job)) == ("move", DecisionKind.REDO, ("n0", "s0", "n2"))
    assert job.orders(msg.Begin)[w("s0")].assignment == (), "it has the state, and takes n1's micro-batches"
    assert not job.emitted(ev.NodeLeft)
    gone_on(job, 4, "n0", "s0", "n2")
    (left,) = job.emitted(ev.NodeLeft)
    assert (left.node, left.reason) == ("n1", "moved")
    (ready,) = job.emitted(ev.StandbyReady)
    assert (ready.node, ready.roles, ready.warm_s) == ("n1", 1, 0.0)
    (moved,) = job.emitted(ev.NodeMoved)
    assert (moved.from_node, moved.to_node, moved.reason) == ("n1", "s0", "move")
    order = next(i.message.order for i in job.last if getattr(getattr(i, "message", None), "worker", "") == w("n1"))
    assert isinstance(order, msg.BecomeStandby)
    assert order.generation == 3
    assert job.machine.record.leaving == job.machine.record.drained == ()
    assert job.machine.record.wanted == 3


def test_a_moved_node_replaces_the_next_lost_node_in_the_same_process() -> None:
    job = with_standbys("s0")
    moves(job, "n1")
    gone_on(job, 4, "n0", "s0", "n2")
    job.lose("s0")
    job.report("n0", 4)
    job.report("n2", 4)
    assert members(job) == ("n0", "n1", "n2")
    assert job.orders(msg.Begin).keys() == {w("n0"), w("n1"), w("n2")}
    assert [joined.names for joined in job.emitted(ev.NodesJoined)] == [("n1",)]


def test_a_moved_node_is_taken_back_if_the_others_are_lost_right_after() -> None:
    job = with_standbys("s0")
    moves(job, "n1")
    for node in ("n0", "n2", "s0"):
        job.lose(node)
    job.report("n1", 3)
    (begun,) = job.emitted(ev.GenerationStarted)
    assert begun.decision is DecisionKind.REDO, "nothing is lost"
    assert members(job) == ("n1",)
    assert not [event for event in job.events if isinstance(event, ev.RolledBack)]


def test_several_nodes_move_at_once_to_their_named_standbys() -> None:
    job = with_standbys("s0", "s1")
    moves(job, "n2", "n0", to=("s1", "s0"))
    assert members(job) == ("s0", "n1", "s1")


def test_a_move_waits_until_its_named_standby_is_warm() -> None:
    job = with_standbys("s0")
    add_standbys(job, "s1", warm=False)
    job.feed(MoveNodes(("n1",), ("s1",)))
    job.step(2)
    assert job.machine.record.pending is None
    job.deliver(msg.Warmed(worker=w("s1"), seconds=1.0))
    joins(job, "s1", step=3)
    for node in ("n0", "n1", "n2", "s1"):
        job.report(node, 4)
    assert members(job) == ("n0", "s1", "n2")


def test_a_move_that_loses_its_standby_waits_for_another_warm_one() -> None:
    job = with_standbys("s0")
    job.feed(MoveNodes(("n1",)))
    job.lose("s0")
    assert (job.machine.context.interruption.stop, job.machine.record.pending) == (None, None)
    assert [one.node for one in job.machine.record.leaving] == ["n1"]
    job.step(2)
    add_standbys(job, "s1")
    job.now += 10.0
    job.step(3)
    joins(job, "s1", step=4)
    for node in (*ALL, "s1"):
        job.report(node, 5)
    assert members(job) == ("n0", "s1", "n2")
    assert job.machine.record.wanted == 3


def test_a_joining_standby_computes_nothing_and_the_shares_do_not_change() -> None:
    job = with_standbys("s0")
    job.feed(MoveNodes(("n1",)))
    pending = job.machine.record.pending
    assert pending is not None
    assert pending.counts == (2, 2, 2, 0)
    assert job.machine.context.interruption.stop is None
    joins(job, "s0")
    assert job.machine.record.wanted == 3, "it joins for an existing rank"
    assert job.machine.context.interruption.stop is not None, "it leaves after the first step that all of them share"


def test_the_next_standby_takes_the_rank_if_a_joined_standby_is_lost() -> None:
    job = with_standbys("s0", "s1")
    job.feed(MoveNodes(("n1",), ("s0",)))
    joins(job, "s0")
    job.lose("s0")
    for node in ALL:
        job.report(node, 3)
    assert members(job) == ALL, "no rank is empty, so s1 stays a standby"
    assert job.machine.record.wanted == 3
    assert [(one.node, one.to) for one in job.machine.record.leaving] == [("n1", "s0")]
    gone_on(job, 4, *ALL, generation=job.machine.record.generation)
    joins(job, "s1", step=5)
    for node in (*ALL, "s1"):
        job.report(node, 6)
    assert members(job) == ("n0", "s1", "n2")


def test_a_joined_standby_takes_the_rank_if_its_moving_node_is_lost() -> None:
    job = with_standbys("s0")
    job.feed(MoveNodes(("n1",)))
    joins(job, "s0")
    job.lose("n1")
    for node in ("n0", "n2", "s0"):
        job.report(node, 3)
    assert members(job) == ("n0", "s0", "n2")
    assert job.machine.record.leaving == ()
    generation = job.machine.record.generation
    gone_on(job, 4, "n0", "s0", "n2", generation=generation)
    moved = [(event.from_node, event.to_node) for event in job.events if isinstance(event, ev.NodeMoved)]
    assert moved == [("n1", "s0")]
    assert (job.machine.record.wanted, job.machine.record.leaving) == (3, ())


def test_a_second_standby_stays_one_if_a_new_node_replaces_a_lost_one() -> None:
    """The moving node is lost too; its replacement has already joined."""
    job = with_standbys("s0", "s1")
    job.feed(MoveNodes(("n1",), ("s0",)))
    joins(job, "s0")
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    job.lose("n0")
    job.lose("n1")
    for node in ("n2", "s0"):
        job.report(node, 3)
    assert sorted(members(job)) == ["n2", "n3", "s0"]
    assert "s1" in job.machine.members.standbys


def test_a_failure_before_the_join_completes_a_move_immediately() -> None:
    job = with_standbys("s0")
    job.feed(MoveNodes(("n1",)))
    job.lose("n2")
    for node, at in (("n0", 1), ("n1", 1), ("s0", None)):
        job.report(node, at)
    assert members(job) == ("n0", "s0")
    assert job.machine.record.wanted == 3, "n2's rank is still to be filled"


def test_the_downtime_of_a_move_includes_the_join_and_the_departure() -> None:
    job = with_standbys("s0")
    for _ in range(5):
        job.machine.context.progress.costs.add_step(1.0, 0.0, 2)
    job.feed(MoveNodes(("n1",)))
    job.join("s0", step=2, received=5_000_000)
    job.now += 1.25
    job.step(3, *ALL, "s0", generation=2)
    for node in (*ALL, "s0"):
        job.report(node, 3)
    job.now += 1.5
    gone_on(job, 4, "n0", "s0", "n2")
    moved = [event for event in job.events if isinstance(event, ev.NodeMoved)]
    assert [(one.from_node, one.to_node, one.moved_bytes) for one in moved] == [("n1", "s0", 5_000_000)]
    assert moved[0].down_s == pytest.approx(0.25 + 1.5), "the join, excluding a step, plus the departure"
    assert [event.action for event in job.events if isinstance(event, ev.Recovered)] == ["grow", "replace"]


def reported_moves(job: Job) -> list[tuple[str, str, str]]:
    return [(one.from_node, one.to_node, one.reason) for one in job.events if isinstance(one, ev.NodeMoved)]


def test_a_move_is_reported_if_another_node_is_lost_right_after() -> None:
    """`holdfast move` once waited for it, and finally reported that no node had the rank."""
    job = with_standbys("s0")
    moves(job, "n1")
    job.lose("n2")
    for node in ("n0", "n1", "s0"):
        job.report(node, 3)
    gone_on(job, 4, "n0", "s0", generation=4)
    assert reported_moves(job) == [("n1", "s0", "move")]


def test_a_new_coordinator_reports_a_move_if_a_generation_must_restart() -> None:
    job = with_standbys("s0")
    moves(job, "n1")
    job.boot(takeover=True)
    assert [(one.node, one.beside) for one in job.machine.record.leaving if one.owed] == [("n1", "s0")]
    for node in (*ALL, "s0"):
        kept = (attach(w(node)), msg.Begun(worker=w(node), generation=1 + (node == "s0")))
        job.connect(hello(node, kept=kept))
    job.lose("n2")
    for node in ("n0", "n1", "s0"):
        job.report(node, 3)
    gone_on(job, 4, "n0", "s0", generation=job.machine.record.generation)
    assert reported_moves(job) == [("n1", "s0", "move")]


def test_a_node_moved_during_another_recovery_has_not_failed() -> None:
    job = with_standbys("s0")
    job.feed(MoveNodes(("n1",)))
    joins(job, "s0")
    job.lose("n2")
    for node in ("n0", "n1", "s0"):
        job.report(node, 3)
    gone_on(job, 4, "n0", "s0", generation=job.machine.record.generation)
    assert reported_moves(job) == [("n1", "s0", "move")]


def test_a_second_standby_gets_the_moved_rank_if_the_first_is_lost_early() -> None:
    job = with_standbys("s0", "s1")
    moves(job, "n1")
    job.lose("s0")
    for node in ("n0", "n1", "n2"):
        job.report(node, 3)
    assert members(job) == ("n0", "s1", "n2")
    gone_on(job, 4, "n0", "s1", "n2", generation=4)
    assert reported_moves(job) == [("n1", "s1", "move")]


def test_the_loss_of_a_moved_node_does_not_stop_the_others() -> None:
    job = with_standbys("s0")
    moves(job, "n1")
    job.lose("n1")
    assert job.machine.context.interruption.stop is None
    assert [(left.node, left.reason) for left in job.emitted(ev.NodeLeft)] == [("n1", "moved")]
    gone_on(job, 4, "n0", "s0", "n2")
    assert job.emitted(ev.StepCommitted)


def test_a_worker_process_that_ends_right_after_a_move_is_replaced() -> None:
    job = with_standbys("s0")
    moves(job, "n1")
    job.deliver_from(
        "n1", msg.WorkerDown(worker=w("n1"), kind=msg.FailureKind.PROCESS_EXIT, detail="killed", exit_code=-9)
    )
    assert job.machine.context.interruption.stop is None
    job.deliver(attach(w("n1", "b")))
    gone_on(job, 4, "n0", "s0", "n2")
    job.tick(1.0)
    warm = [one for one in job.machine.record.standbys if one.node == "n1"]
    assert [(one.ready, one.promoted, one.tries) for one in warm] == [(False, False, 1)]
    assert job.machine.members.standbys["n1"].complete


def test_a_new_coordinator_knows_a_moved_node_as_a_warm_standby() -> None:
    job = with_standbys("s0")
    moves(job, "n1")
    gone_on(job, 4, "n0", "s0", "n2")
    job.boot(takeover=True)
    job.connect(hello("n1", kept=(attach(w("n1")), msg.Warmed(worker=w("n1"), seconds=0.0))))
    assert job.sent(msg.Welcome)
    assert "n1" in job.machine.members.standbys
    assert job.machine.context.standbys.ready("n1")


def test_a_moved_node_unaware_of_its_move_must_restart_its_processes() -> None:
    job = with_standbys("s0")
    moves(job, "n1")
    gone_on(job, 4, "n0", "s0", "n2")
    job.boot(takeover=True)
    job.connect(hello("n1", kept=(attach(w("n1")), msg.Begun(worker=w("n1"), generation=1))))
    (refused,) = job.sent(msg.Refused)
    assert refused.retry


def test_invalid_move_requests_are_refused_without_effect() -> None:
    job = with_standbys("s0")
    wrong = (
        (BadInputError, "no node is named", (), ()),
        (BadInputError, "'n1' is named twice", ("n1", "n1"), ()),
        (BadInputError, "'s0' is named twice", ("n1", "n2"), ("s0", "s0")),
        (UnreachableError, "no node 'n9': the nodes are n0, n1, n2, s0", ("n9",), ()),
        (UnreachableError, "no node 's9': the standbys are s0", ("n1",), ("s9",)),
        (BadInputError, "n2 is in use", ("n1",), ("n2",)),
        (BadInputError, "n2 will leave", ("n1", "n2"), ("n2", "n1")),
        (BadInputError, "s0 is a standby: it has no place to give", ("s0",), ()),
        (BadInputError, "2 targets are named for node n1", ("n1",), ("s0", "s1")),
        (RefusedError, "nodes n1, n2 cannot move: there is 1 standby for 2; start one", ("n1", "n2"), ()),
    )
    for error, said, nodes, to in wrong:
        with pytest.raises(error, match=said):
            job.feed(MoveNodes(nodes, to))
    assert job.machine.record.leaving == ()
    job.feed(MoveNodes(("n1",), ("s0",)))
    with pytest.raises(BadInputError, match="standby s0 will replace node n1"):
        job.feed(MoveNodes(("n2",), ("s0",)))


def test_a_move_without_a_standby_is_refused_with_advice() -> None:
    job = Job().start()
    with pytest.raises(RefusedError, match=r"there is no standby; start one \(holdfast agent --standby\)"):
        job.feed(MoveNodes(("n1",)))


def test_a_moving_node_can_be_drained_instead() -> None:
    job = with_standbys("s0")
    job.feed(MoveNodes(("n1",)))
    job.feed(Drain(("n1",)))
    joins(job, "s0")
    for node in (*ALL, "s0"):
        job.report(node, 3)
    gone_on(job, 4, "n0", "s0", "n2")
    assert [one.node for one in job.machine.record.drained] == ["n1"]


@pytest.mark.parametrize("request_", [MoveNodes(("n0",)), Drain(("n0",))])
def test_a_standby_joins_next_to_the_last_node_before_it_leaves(request_: MoveNodes | Drain) -> None:
    """It has the only copy of the state, which the standby receives before the node leaves."""
    job = Job(nodes=1).start()
    job.step(1)
    add_standbys(job, "s0")
    job.feed(request_)
    job.step(2)
    assert job.machine.context.interruption.stop is None
    pending = job.machine.record.pending
    assert pending is not None
    assert [member.node for member in pending.members] == ["n0", "s0"]
    for node in ("n0", "s0"):
        job.deliver(msg.Prepared(worker=w(node), generation=2))
    job.deliver(applied(w("n0"), 1, 3, commit(1.0, msg.Flag.SWAP)))
    for node in ("n0", "s0"):
        job.deliver(msg.Entered(worker=w(node), generation=2, applied=3))
    job.step(4, "n0", "s0", generation=2)
    for node in ("n0", "s0"):
        job.report(node, 4)
    assert members(job) == ("s0",)
    gone_on(job, 5, "s0")
    assert [left.node for left in job.emitted(ev.NodeLeft)] == ["n0"]
    assert job.machine.record.wanted == 1
    assert [moved.to_node for moved in job.events if isinstance(moved, ev.NodeMoved)] == ["s0"]


def test_the_last_node_cannot_be_drained_without_a_standby() -> None:
    job = Job(nodes=1).start()
    with pytest.raises(RefusedError, match="no node would be left"):
        job.feed(Drain(("n0",)))
