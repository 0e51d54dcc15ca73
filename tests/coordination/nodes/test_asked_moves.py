"""Tests of requested moves: the nodes that may move, their standbys, and the reasons to wait."""

from __future__ import annotations

import msgspec
import pytest
from machinery import Job, attach, hello, w

from holdfast.coordination.inputs import MoveNodes, Shutdown
from holdfast.coordination.job.foresight import describe_wait
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.messages import any_side as msg


def beside(*standbys: str, warm: bool = True, nodes: int = 3) -> Job:
    """Return a job of nodes that have committed step 1, with standbys."""
    job = Job(nodes=nodes).start()
    job.step(1, *(f"n{index}" for index in range(nodes)))
    for name in standbys:
        add_standby(job, name, warm=warm)
    return job


def add_standby(job: Job, name: str, *, warm: bool) -> None:
    job.connect(msgspec.structs.replace(hello(name), standby=True))
    job.deliver(attach(w(name)))
    if warm:
        job.deliver(msg.Warmed(worker=w(name), seconds=0.5))


def waited_for(job: Job) -> dict[str, str]:
    return {one.node: describe_wait(job.machine.context, one) for one in job.machine.record.leaving}


def test_invalid_move_requests_are_refused_without_effect() -> None:
    job = beside("s0", "s1")
    for names, to, error, match in (
        ((), (), BadInputError, "no node is named"),
        (("n9",), (), UnreachableError, "no node 'n9': the nodes are n0, n1, n2"),
        (("n1", "n1"), (), BadInputError, "'n1' is named twice"),
        (("n1", "n2"), ("s0", "s0"), BadInputError, "'s0' is named twice"),
        (("n1",), ("n2",), BadInputError, "node n2 is in use: it has a place of its own; name a standby"),
        (("n1", "n2"), ("n2", "n1"), BadInputError, "node n2 will leave: it cannot take over ranks"),
        (("n1",), ("n1",), BadInputError, "node n1 will leave: it cannot take over ranks"),
        (("n1",), ("s0", "s1"), BadInputError, "2 targets are named for node n1"),
        (("n1",), ("s9",), UnreachableError, "no node 's9': the standbys are s0, s1"),
        (("s0",), (), BadInputError, "node s0 is a standby: it has no place to give"),
        (("n0", "n1", "n2"), (), RefusedError, "there are 2 standbys for 3; start one"),
    ):
        with pytest.raises(error, match=match):
            job.feed(MoveNodes(names, to))
    assert not job.machine.record.leaving


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_move_without_a_standby_is_refused_with_advice(nodes: int) -> None:
    job = beside(nodes=nodes)
    with pytest.raises(RefusedError, match=r"there is no standby; start one \(holdfast agent --standby\)"):
        job.feed(MoveNodes(("n0",)))
    assert not job.machine.record.leaving


def test_a_move_is_refused_after_the_end_of_the_job() -> None:
    job = beside("s0")
    job.machine.context.job_end.fail_job("for a test")
    with pytest.raises(RefusedError, match="the job is failed: nodes need not leave it"):
        job.feed(MoveNodes(("n1",)))


def test_a_standby_reserved_for_one_move_is_refused_for_another() -> None:
    job = beside("s0", "s1", warm=False)
    job.feed(MoveNodes(("n1",), ("s0",)))
    with pytest.raises(BadInputError, match="standby s0 will replace node n1: name another"):
        job.feed(MoveNodes(("n2",), ("s0",)))
    job.feed(MoveNodes(("n2",), ("s1",)))
    assert {one.node: one.to for one in job.machine.record.leaving} == {"n1": "s0", "n2": "s1"}


def test_a_waiting_move_reports_its_reason() -> None:
    job = beside("s0", warm=False)
    job.feed(MoveNodes(("n1",)))
    assert waited_for(job) == {"n1": "a standby to be warm"}
    job = beside("s0", warm=False)
    add_standby(job, "s1", warm=True)
    job.feed(MoveNodes(("n1",), ("s0",)))
    assert waited_for(job) == {"n1": "standby s0 to be warm"}


def test_the_second_of_two_consecutive_moves_waits_for_the_first() -> None:
    job = beside("s0", "s1")
    job.feed(MoveNodes(("n1",)))
    assert waited_for(job) == {"n1": "standby s0 to join next to it"}
    job.feed(MoveNodes(("n2",)))
    pending = "generation 2 to begin, which is being prepared"
    assert waited_for(job) == {"n1": "standby s0 to join next to it", "n2": pending}
    everybody = job.join("s0", step=2)
    assert waited_for(job) == {"n1": "the end of a step", "n2": "n1, which leaves before it"}
    assert job.machine.record.pending is None, "no other node joins in between"
    job.step(3, *everybody, generation=2)
    assert waited_for(job)["n1"] == "the others to report where they stand"
    for node in everybody:
        job.report(node, 3)
    assert waited_for(job) == {
        "n1": "the others, to go on without it from step 3",
        "n2": "n1, which leaves before it",
    }
    for node in ("n0", "s0", "n2"):
        job.deliver(msg.Entered(worker=w(node), generation=3, applied=3))
    job.step(4, "n0", "s0", "n2", generation=3)
    assert waited_for(job) == {"n2": "standby s1 to join next to it"}


def test_one_of_two_moves_waits_for_a_cold_standby() -> None:
    job = beside("s0")
    add_standby(job, "s1", warm=False)
    job.feed(MoveNodes(("n1", "n2")))
    assert waited_for(job) == {"n1": "standby s0 to join next to it", "n2": "a standby to be warm"}


def test_a_move_waits_for_nothing_while_the_job_ends() -> None:
    job = Job().start(saves=True)
    job.step(1)
    add_standby(job, "s0", warm=True)
    job.feed(Shutdown(0, "for a test", save=True))
    for node in ("n0", "n1", "n2"):
        job.report(node, 1)
    job.feed(MoveNodes(("n1",)))
    assert waited_for(job) == {"n1": "nothing: the job ends"}


def test_a_move_waits_for_a_pending_join() -> None:
    job = beside("s0")
    job.connect(hello("n3"))
    job.deliver(attach(w("n3")))
    assert job.machine.record.pending is not None
    job.feed(MoveNodes(("n1",)))
    assert waited_for(job) == {"n1": "generation 2 to begin, which is being prepared"}
