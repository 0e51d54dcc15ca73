"""Tests of waiting moves: for an earlier move, for another standby than the named one, or in vain."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from machinery import Job, attach, hello, w

from holdfast.coordination.inputs import MoveNodes, Shutdown
from holdfast.coordination.job.foresight import describe_wait, forecast_moves
from holdfast.coordination.nodes.standbys import MAX_TRIES
from holdfast.errors import EXIT_FAILED, BadInputError, RefusedError
from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.job_spec import JobSpec, RecoverySpec
from holdfast.protocol.messages import any_side as msg

ALL = ("n0", "n1", "n2")


def beside(*standbys: str, warm: bool = True, spec: JobSpec | None = None, saves: bool = False) -> Job:
    """Return a job of nodes n0 to n2 that have committed step 1, with standbys."""
    job = (Job(spec=spec) if spec is not None else Job()).start(saves=saves)
    job.step(1)
    for name in standbys:
        add_standby(job, name, warm=warm)
    return job


def add_standby(job: Job, name: str, *, warm: bool = True) -> None:
    job.connect(msgspec.structs.replace(hello(name), standby=True))
    job.deliver(attach(w(name)))
    if warm:
        job.deliver(msg.Warmed(worker=w(name), seconds=0.5))


def fails_to_warm_up(job: Job, name: str) -> None:
    """Make a standby's script raise in each warm-up."""
    for nonce in "abcdef"[:MAX_TRIES]:
        worker = w(name, nonce)
        job.deliver(msg.Warmed(worker=worker, seconds=0.5, error="ValueError: cold"))
        why = {"kind": FailureKind.EXCEPTION, "detail": "it raised", "exit_code": EXIT_FAILED}
        job.deliver_from(name, msg.WorkerDown(worker=worker, **why))
        job.deliver(attach(w(name, chr(ord(nonce) + 1))))
        time_goes_by(job)


def time_goes_by(job: Job, seconds: float = 1.0) -> None:
    for name in job.connections:
        if name in job.machine.members.nodes:
            job.deliver_from(name, msg.Heartbeat())
    job.tick(seconds)


def leaving(job: Job) -> list[str]:
    return [one.node for one in job.machine.record.leaving]


def waited_for(job: Job) -> dict[str, str]:
    return {one.node: describe_wait(job.machine.context, one) for one in job.machine.record.leaving}


def stayed(job: Job) -> list[tuple[str, str]]:
    return [(event.node, event.detail) for event in job.events if isinstance(event, ev.NodeStayed)]


def moved(job: Job) -> list[tuple[str, str]]:
    return [(event.from_node, event.to_node) for event in job.events if isinstance(event, ev.NodeMoved)]


def beside_of(job: Job) -> dict[str, str]:
    return {one.node: one.beside for one in job.machine.record.leaving}


def complete_move(job: Job, standby: str, step: int) -> None:
    """Make a standby join at a step and the draining node leave at the next one; the others continue."""
    everybody = job.join(standby, step=step)
    job.step(step + 1, *everybody, generation=job.machine.record.generation)
    for node in everybody:
        job.report(node, step + 1)
    plan = job.machine.record.plan
    assert plan is not None
    stayers = [member.node for member in plan.members]
    for node in stayers:
        job.deliver(msg.Entered(worker=w(node), generation=plan.generation, applied=step + 1))
    job.step(step + 2, *stayers, generation=plan.generation)


# ---- the named standby ----


@pytest.mark.parametrize("warm", [True, False])
def test_another_warm_standby_takes_the_rank_if_the_named_one_is_lost(warm: bool) -> None:
    job = beside("s1")
    add_standby(job, "s0", warm=warm)
    job.feed(MoveNodes(("n1",), ("s0",)))
    job.lose("s0")
    job.step(2)
    time_goes_by(job)
    assert beside_of(job) == {"n1": "s1"}
    complete_move(job, "s1", 3)
    assert moved(job) == [("n1", "s1")]
    (event,) = [event for event in job.events if isinstance(event, ev.NodeMoved)]
    assert event.detail == "standby s0, which was asked for, cannot replace it"


def test_a_move_that_lost_its_named_standby_waits_for_a_new_one() -> None:
    job = beside("s0", warm=False)
    job.feed(MoveNodes(("n1",), ("s0",)))
    assert waited_for(job) == {"n1": "standby s0 to be warm"}
    job.lose("s0")
    assert waited_for(job) == {"n1": "a standby to be warm (s0, which was asked for, cannot be)"}
    add_standby(job, "s1")
    assert beside_of(job) == {"n1": "s1"}


def test_a_move_uses_another_standby_once_the_named_one_is_lost() -> None:
    job = beside("s0", "s1", warm=False)
    job.feed(MoveNodes(("n1",), ("s0",)))
    job.deliver(msg.Warmed(worker=w("s1"), seconds=0.5))
    assert beside_of(job) == {"n1": ""}, "s0 may still become warm"
    job.lose("s0")
    job.step(2)
    assert beside_of(job) == {"n1": "s1"}


def test_a_new_coordinator_waits_a_lease_for_the_named_standby() -> None:
    job = beside("s1")
    add_standby(job, "s0", warm=False)
    job.feed(MoveNodes(("n1",), ("s0",)))
    job.boot(takeover=True)
    for node in ALL:
        entered = msg.Entered(worker=w(node), generation=1, applied=1)
        job.connect(hello(node, kept=(attach(w(node)), entered), term=1))
    s1 = hello("s1", kept=(attach(w("s1")), msg.Warmed(worker=w("s1"), seconds=0.5)))
    job.connect(msgspec.structs.replace(s1, standby=True))
    job.step(2)
    assert beside_of(job) == {"n1": ""}, "s0 may still connect"
    for _ in range(8):
        time_goes_by(job, 0.5)
    assert beside_of(job) == {"n1": "s1"}, "s0 has not connected"


# ---- standbys that never become warm ----


def test_a_move_is_refused_if_its_only_standby_cannot_warm_up() -> None:
    job = beside("s0", warm=False)
    fails_to_warm_up(job, "s0")
    said = (
        f"node n1 cannot move: standby s0 has failed to warm up {MAX_TRIES} times (holdfast logs --node s0): "
        "start another (holdfast agent --standby), or let it leave (holdfast drain n1)"
    )
    with pytest.raises(RefusedError) as refused:
        job.feed(MoveNodes(("n1",)))
    assert str(refused.value) == said
    with pytest.raises(RefusedError):
        forecast_moves(job.machine.context, ["n1"], stays=True)
    add_standby(job, "s1")
    with pytest.raises(RefusedError, match=r"standby s0 has failed to warm up 3 times .*: name another"):
        job.feed(MoveNodes(("n1",), ("s0",)))
    job.feed(MoveNodes(("n1",)))
    assert beside_of(job) == {"n1": "s1"}


@pytest.mark.parametrize("to", [(), ("s0",)])
def test_a_waiting_move_is_cancelled_if_its_standby_cannot_warm_up(to: tuple[str, ...]) -> None:
    job = beside("s0", warm=False)
    job.feed(MoveNodes(("n1",), to))
    fails_to_warm_up(job, "s0")
    assert leaving(job) == []
    ((node, why),) = stayed(job)
    assert node == "n1"
    assert why.startswith(f"standby s0 has failed to warm up {MAX_TRIES} times (holdfast logs --node s0): start ")
    (asked,) = [event for event in job.events if isinstance(event, ev.ActionRequested)]
    assert (asked.who, asked.command) == ("operator", "holdfast agent --standby")


def test_a_move_does_not_wait_for_a_standby_that_does_not_fit() -> None:
    job = beside("s0", warm=False)
    job.feed(MoveNodes(("n1",)))
    down = msg.WorkerDown(worker=w("s0"), kind=FailureKind.EXCEPTION, detail="no", exit_code=2)
    job.deliver_from("s0", down)
    ((node, why),) = stayed(job)
    assert (node, why.startswith("standby s0 does not fit the job: start another")) == ("n1", True)


def test_a_move_keeps_waiting_if_another_standby_may_become_warm() -> None:
    job = beside("s0", "s1", warm=False)
    job.feed(MoveNodes(("n1",), ("s0",)))
    fails_to_warm_up(job, "s0")
    assert (leaving(job), stayed(job)) == (["n1"], [])
    job.deliver(msg.Warmed(worker=w("s1"), seconds=0.5))
    assert beside_of(job) == {"n1": "s1"}


# ---- consecutive moves ----


def test_a_second_move_waits_until_the_first_moved_node_is_a_standby() -> None:
    job = beside("s0")
    job.feed(MoveNodes(("n1",)))
    job.feed(MoveNodes(("n2",)))
    assert waited_for(job)["n2"] == "n1, which gives its own place away before it and is a standby then"
    (foreseen,) = forecast_moves(job.machine.context, ["n0"], stays=True)
    assert (foreseen.to, foreseen.wait_s) == ("n1", None)
    assert foreseen.why.startswith("n1 gives its own place away before, and is a standby then")
    complete_move(job, "s0", 2)
    assert moved(job) == [("n1", "s0")]
    assert beside_of(job) == {"n2": "n1"}
    complete_move(job, "n1", 5)
    assert moved(job) == [("n1", "s0"), ("n2", "n1")]
    assert leaving(job) == []


def test_a_moving_node_may_be_the_named_standby_of_the_next_move() -> None:
    job = beside("s0")
    job.feed(MoveNodes(("n1",)))
    with pytest.raises(BadInputError, match="standby s0 will replace node n1: name another"):
        job.feed(MoveNodes(("n2",), ("s0",)))
    job.feed(MoveNodes(("n2",), ("n1",)))
    complete_move(job, "s0", 2)
    complete_move(job, "n1", 5)
    assert moved(job) == [("n1", "s0"), ("n2", "n1")]


def test_two_moves_in_one_request_need_two_standbys() -> None:
    job = beside("s0")
    with pytest.raises(RefusedError, match="nodes n1, n2 cannot move: there is 1 standby for 2; start one"):
        job.feed(MoveNodes(("n1", "n2")))


def test_a_move_waits_for_an_automatically_started_standby() -> None:
    job = beside(spec=JobSpec(recovery=RecoverySpec(standbys=1)))
    job.feed(MoveNodes(("n1",)))
    assert waited_for(job) == {"n1": "a standby to be warm"}
    add_standby(job, "s0")
    assert beside_of(job) == {"n1": "s0"}


# ---- the job's end ----


def finishes(job: Job) -> None:
    for name in ALL:
        job.deliver(msg.Finished(worker=w(name), generation=1, step=2))


def fails(job: Job) -> None:
    job.deliver_from(
        "n0", msg.WorkerDown(worker=w("n0"), kind=FailureKind.EXCEPTION, detail="no", exit_code=1, final=True)
    )


def is_ended(job: Job) -> None:
    job.feed(Shutdown(75, "for a test"))


@pytest.mark.parametrize("ends", [finishes, fails, is_ended])
def test_a_move_unfinished_at_the_end_of_the_job_is_reported(ends: Callable[[Job], None]) -> None:
    job = beside("s0", warm=False)
    job.feed(MoveNodes(("n1",)))
    job.step(2)
    ends(job)
    assert job.machine.over is not None
    assert stayed(job) == [("n1", "the job ended before a standby had its place")]
    assert isinstance(job.events[-1], ev.JobFinished | ev.JobFailed | ev.ActionRequested)
    assert leaving(job) == [], "another run does not continue the move"
