"""Tests of a pool's job: nodes join by grants and are returned, and the job follows the pool's requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from machinery import Job, attach, calls, hello, kept, w, written

from holdfast.coordination.inputs import PoolSaid, Tick
from holdfast.coordination.instructions import EndJob, Persist, SendToPool
from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.pool.grants import Held
from holdfast.protocol.pool.sharing import JobShares, JobState, NodeUnfit, PoolWish
from holdfast.protocol.record import Quarantined


class Pooled(Job):
    """Drives the coordinator of a job in a pool."""

    version = 0

    def grants(
        self, leaving: tuple[int, ...] = (), wish: Any = "run", term: int = 1, stranded: bool = False, **grants: int
    ) -> None:
        self.version += 1
        shares = JobShares(
            term=term,
            version=self.version,
            submission=1,
            grants=grants,
            leaving=frozenset(leaving),
            wish=wish,
            stranded=stranded,
        )
        self.feed(PoolSaid(shares))

    def come(self, node: str, grant: int, session: str = "") -> None:
        self.connect(msgspec.structs.replace(hello(node, session=session), grant=grant))

    def join(self, node: str, grant: int, *, saves: bool = False) -> None:
        self.come(node, grant)
        self.deliver(msgspec.structs.replace(attach(w(node)), saves=saves))

    def train(self, *nodes: str, saves: bool = False) -> Pooled:
        """Grant these nodes as 1, 2, ..., and make the job train."""
        self.boot()
        numbers = {node: number for number, node in enumerate(nodes, 1)}
        self.grants(**numbers)
        for node, number in numbers.items():
            self.join(node, number, saves=saves)
        for node in nodes:
            self.deliver(msg.Entered(worker=w(node), generation=1, applied=0))
        return self

    @property
    def reports(self) -> list[JobState]:
        """Return the states last sent to the pool."""
        return [one.stands for one in self.last if isinstance(one, SendToPool)]

    @property
    def held(self) -> Held:
        held = self.machine.record.held
        assert held is not None
        return held


def pooled(nodes: int = 2, **spec: Any) -> Pooled:
    return Pooled(nodes=nodes, submission=1, spec=JobSpec(**spec))


def test_a_job_outside_a_pool_has_no_grants_and_reports_nothing() -> None:
    job = Job(nodes=1).start()
    assert job.machine.record.held is None
    assert not any(isinstance(one, SendToPool) for one in job.last)


def test_grants_are_written_to_the_record_before_they_are_reported() -> None:
    job = pooled()
    job.boot()
    job.grants(n0=1, n1=2)
    kinds = [type(one) for one in job.last]
    assert kinds.index(Persist) < kinds.index(SendToPool)
    assert job.reports[-1].held == {1, 2}
    assert job.records[-1].held == job.held


def test_the_cost_of_a_tick_does_not_depend_on_the_number_of_grants() -> None:
    def cost(nodes: int) -> int:
        job = pooled(nodes=nodes, min_nodes=nodes).train(*(f"n{number}" for number in range(nodes)))
        job.tick(0.01)
        return calls(lambda: job.machine.handle(Tick(), job.now))

    assert cost(32) <= cost(4) + 5


def test_each_change_is_reported_to_the_pool_once() -> None:
    job = pooled(nodes=3).train("n0", "n1")
    job.tick(0.01)
    assert job.tick(0.01) == []
    job.machine.context.pool_client.refuse_node("n7", "old")
    job.tick(0.01)
    assert [one.refuses for one in job.reports] == [{"n7": NodeUnfit(why="old")}]
    job.machine.transaction.change(quarantined=(Quarantined(node="n8", host="h", why="broken", since=job.now),))
    job.tick(0.01)
    assert [one.refuses for one in job.reports] == [{"n7": NodeUnfit(why="old"), "n8": NodeUnfit(why="broken")}]
    job.tick(0.01)
    assert not job.reports


def test_a_node_joins_only_by_a_grant_that_the_job_holds() -> None:
    job = pooled()
    job.boot()
    job.grants(n0=7)
    for node, grant in (("n0", 6), ("n1", 7), ("n0", 0)):
        job.come(node, grant)
        assert job.kinds == ["close"], (node, grant)
    job.come("n0", 7)
    assert job.sent(msg.Welcome)
    assert job.held.grants["n0"].came


def test_a_member_is_lost_once_its_node_has_another_grant() -> None:
    """Its agent has ended the processes of the first grant. A simulation (35619583934) found this."""
    job = pooled().train("n0", "n1")
    job.grants(leaving=(2,), n0=1, n1=2)
    assert [one.node for one in job.machine.record.leaving] == ["n1"]
    job.grants(n0=1, n1=3)
    assert not job.machine.record.leaving, "the recall was of the first grant"
    assert [event.node for event in job.emitted(ev.FailureDetected)] == ["n1"]
    job.report("n0", 0)
    assert job.machine.record.plan is not None
    assert job.machine.record.plan.workers == (w("n0"),)
    assert job.held.numbers == {1, 3}, "the node is expected by its new grant"
    job.join("n1", 3)
    assert job.machine.members.nodes["n1"].complete


def test_the_grant_of_a_lost_node_is_returned_with_the_decision_without_it() -> None:
    job = pooled().train("n0", "n1")
    job.step(1, "n0", "n1")
    job.lose("n1")
    assert job.held.numbers == {1, 2}, "it is not yet decided from which state the others continue"
    job.report("n0", 1)
    assert job.held.numbers == {1}
    assert job.reports[-1].held == {1}
    record = next(one.record for one in job.last if isinstance(one, Persist))
    assert record.held == job.held
    assert record.plan is not None
    assert record.plan.workers == (w("n0"),)


def test_the_grant_of_a_node_that_does_not_join_in_time_is_returned() -> None:
    job = pooled().train("n0")
    job.grants(n0=1, n1=2)
    job.deliver_from("n0", msg.Heartbeat())
    for _ in range(30):
        job.tick(1.9)
        job.deliver_from("n0", msg.Heartbeat())
    assert job.held.numbers == {1, 2}
    for _ in range(3):
        job.tick(1.9)
        job.deliver_from("n0", msg.Heartbeat())
    assert job.held.numbers == {1}


def test_a_recalled_node_drains_and_is_returned_once_its_state_is_not_needed() -> None:
    job = pooled().train("n0", "n1")
    job.step(1, "n0", "n1")
    job.grants(leaving=(2,), n0=1, n1=2)
    assert [one.node for one in job.machine.record.leaving] == ["n1"]
    job.step(2, "n0", "n1")
    job.report("n0", 2)
    job.report("n1", 2)
    assert job.held.numbers == {1, 2}, "its state may still be needed"
    job.deliver(msg.Entered(worker=w("n0"), generation=2, applied=2))
    job.grants(leaving=(2,), n0=1, n1=2)
    ended: list[msg.EndNode] = []
    for step in (3, 4):
        job.step(step, "n0", generation=2)
        ended += job.sent(msg.EndNode)
    assert job.held.numbers == {1}
    assert len(ended) == 1
    assert [one.node for one in job.machine.record.drained] == ["n1"], "it is asked to leave once"
    assert job.machine.record.wanted == 1
    # The same node is accepted with a new grant.
    job.grants(n0=1, n1=5)
    job.come("n1", 5, session="00000abc")
    assert job.sent(msg.Welcome)


def test_a_recalled_node_that_never_joined_is_returned_at_once() -> None:
    job = pooled().train("n0")
    job.grants(n0=1, n1=2)
    job.grants(leaving=(2,), n0=1, n1=2)
    assert job.held.numbers == {1}


def test_a_node_whose_grant_has_ended_is_lost() -> None:
    job = pooled().train("n0", "n1")
    job.grants(n0=1)
    assert "n1" not in job.machine.members.nodes
    assert job.emitted(ev.FailureDetected)
    job.report("n0", None)
    assert job.held.numbers == {1}


def saved_and_suspended() -> Pooled:
    job = pooled(1).train("n0", saves=True)
    job.step(1, "n0")
    job.grants(wish="suspend", n0=1)
    assert job.held.numbers == {1}
    job.report("n0", 1)
    plan = job.machine.record.plan
    assert plan is not None
    assert plan.last
    generation = plan.generation
    job.deliver(msg.Entered(worker=w("n0"), generation=generation, applied=1))
    job.deliver(written("n0", 1, "c", generation=generation))
    job.deliver(kept("n0", 1, "c", generation=generation))
    job.deliver(msg.Finished(worker=w("n0"), generation=generation, step=1))
    return job


def test_a_suspended_job_is_saved_and_returns_all_its_nodes() -> None:
    job = saved_and_suspended()
    assert any(isinstance(one, EndJob) for one in job.last)
    assert job.reports[-1].standing == "suspended"
    assert job.reports[-1].held == frozenset()
    assert job.machine.record.outcome == ""


def test_a_job_that_must_end_at_once_is_not_saved() -> None:
    job = pooled(1).train("n0", saves=True)
    job.step(1, "n0")
    job.grants(wish="stop", n0=1)
    assert job.reports[-1].standing == "going"
    job.grants(wish="stop_now", n0=1)
    assert any(isinstance(one, EndJob) for one in job.last)
    assert job.reports[-1].standing == "stopped"
    assert job.reports[-1].held == frozenset()
    other = pooled(1).train("n0", saves=True)
    other.step(1, "n0")
    other.grants(wish="stop_now", n0=1)
    assert other.reports[-1].standing == "stopped"


def suspended() -> Pooled:
    job = pooled(1).train("n0")
    job.step(1, "n0")
    job.grants(wish="suspend", n0=1)
    assert job.reports[-1].standing == "suspended", "a job without checkpoints has nothing to save"
    return job


def test_a_suspended_job_is_resumed_by_another_coordinator() -> None:
    job = suspended()
    job.boot()
    job.come("n0", 1)
    assert job.kinds == ["close"]
    job.grants(n0=2)
    assert job.held.standing == "going"
    job.come("n0", 2, session="00000abc")
    assert job.sent(msg.Welcome)


@pytest.mark.parametrize("again", [False, True], ids=["at once", "its coordinator dies before"])
def test_a_resumed_job_without_checkpoints_restarts_from_step_0(*, again: bool) -> None:
    """The user was warned and repeated the request with --force; the job once failed when it was resumed."""
    job = suspended()
    job.boot()
    job.grants(n1=2)
    if again:
        job.boot()
    job.join("n1", 2)
    (begun,) = job.emitted(ev.GenerationStarted)
    assert (begun.members, begun.decision) == (("n1",), "start")
    (back,) = job.emitted(ev.RolledBack)
    assert back.to_step == 0
    assert "no checkpoint is kept yet: the job restarts from step 0" in back.why
    job.deliver(msg.Entered(worker=w("n1"), generation=begun.generation, applied=0))
    job.step(1, "n1", generation=begun.generation)
    job.step(2, "n1", generation=begun.generation)
    job.lose("n1")
    assert job.machine.record.outcome == "failed", "a loss still fails the job"


def test_a_job_resumed_on_other_nodes_does_not_wait_for_the_old_ones() -> None:
    """They have left, but the job once waited three seconds for them and then reported them lost."""
    job = saved_and_suspended()
    job.boot()
    job.grants(n1=2)
    job.join("n1", 2, saves=True)
    (begun,) = job.emitted(ev.GenerationStarted)
    assert begun.members == ("n1",)
    assert job.machine.record.decision is not None
    assert job.machine.record.decision.applied == 1
    job.deliver(msg.Entered(worker=w("n1"), generation=begun.generation, applied=1))
    for _ in range(8):
        job.deliver_from("n1", msg.Heartbeat())
        job.tick(1.0)
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]


def test_a_suspended_job_returns_a_node_granted_before_it_was_suspended_again() -> None:
    job = suspended()
    job.boot()
    job.grants(wish="suspend", n0=2)
    assert job.reports[-1].held == frozenset()
    assert job.reports[-1].standing == "suspended"


@pytest.mark.parametrize("wish", ["stop", "stop_now"])
@pytest.mark.parametrize("again", [False, True])
def test_a_suspended_job_that_must_end_has_ended(wish: PoolWish, again: bool) -> None:
    job = suspended()
    if again:
        job.boot()
    job.grants(wish=wish)
    assert job.reports[-1].standing == "stopped"
    assert job.reports[-1].heard == job.held.heard


def test_an_ended_job_accepts_no_grants_and_reports_its_end() -> None:
    job = pooled(1).train("n0")
    job.grants(wish="stop", n0=1)
    assert job.reports[-1].standing == "stopped"
    job.boot()
    job.grants(n0=1, n1=9)
    assert job.reports[-1].standing == "stopped"
    assert job.reports[-1].held == frozenset()


def test_a_failed_job_reports_the_reason_to_the_pool() -> None:
    job = pooled(1).train("n0")
    job.deliver_from("n0", msg.WorkerDown(worker=w("n0"), kind="exit", exit_code=2, detail="no such option --lrr"))
    assert job.reports[-1].standing == "failed"
    assert "--lrr" in job.reports[-1].why


def test_a_new_coordinator_waits_for_members_and_gives_other_nodes_their_full_time() -> None:
    job = pooled().train("n0", "n1")
    job.step(1, "n0", "n1")
    job.grants(n0=1, n1=2, n2=3)
    job.come("n2", 3)
    assert job.held.grants["n2"].came
    job.boot(takeover=True)
    assert job.held.numbers == {1, 2, 3}
    assert not job.held.grants["n2"].came
    assert job.held.grants["n0"].came
    job.tick(4.0)
    assert job.held.numbers >= {3}


def test_an_unfit_node_is_returned_and_refused_to_the_pool() -> None:
    job = pooled().train("n0")
    job.grants(n0=1, n1=2)
    job.connect(msgspec.structs.replace(hello("n1"), grant=2, unfit="its disk is full"))
    assert job.held.numbers == {1}
    assert job.reports[-1].refuses == {"n1": NodeUnfit(grant=2, why="its disk is full")}
    assert not job.machine.record.quarantined, "the pool may grant the node again after it has changed"
    job.grants(n0=1, n1=3)
    job.come("n1", 3, session="00000abc")
    assert job.sent(msg.Welcome)
    assert not job.reports[-1].refuses


NO_SCRIPT = "there is no script /a/train.py on it that can be read"


def unfit(job: Pooled, node: str, grant: int) -> None:
    job.connect(msgspec.structs.replace(hello(node), grant=grant, unfit=NO_SCRIPT))


def test_a_job_whose_nodes_are_unfit_waits_until_the_pool_has_no_other() -> None:
    job = pooled(1)
    job.boot()
    job.grants(n0=1)
    unfit(job, "n0", 1)
    assert job.reports[-1].standing == "going"
    assert job.reports[-1].held == frozenset()
    job.grants(n1=2)
    unfit(job, "n1", 2)
    job.grants()
    assert job.reports[-1].standing == "going"
    old = JobShares(term=1, version=1, submission=1, stranded=True)
    job.feed(PoolSaid(old))
    assert job.reports[-1].standing == "going", "the refusal concerned the earlier node"
    job.grants(stranded=True)
    assert job.reports[-1].standing == "failed"
    why = job.reports[-1].why
    assert why == f"too few usable nodes in the pool (needs 1): n0: {NO_SCRIPT}; n1: {NO_SCRIPT}"


def test_a_job_that_has_not_begun_fails_if_too_few_nodes_are_fit() -> None:
    job = pooled(2)
    job.boot()
    job.grants(n0=1, n1=2)
    job.come("n0", 1)
    unfit(job, "n1", 2)
    job.grants(n0=1, stranded=True)
    assert job.reports[-1].standing == "failed"
    assert "(needs 2): n1: there is no script" in job.reports[-1].why


def test_unfit_nodes_do_not_fail_a_job_that_trains() -> None:
    job = pooled(1).train("n0")
    job.grants(n0=1, n1=2)
    unfit(job, "n1", 2)
    job.grants(n0=1, stranded=True)
    assert job.reports[-1].standing == "going"
    assert job.held.numbers == {1}


def test_a_node_with_another_script_is_refused_to_the_pool_with_the_reason() -> None:
    job = pooled(2)
    job.boot()
    job.grants(n0=1, n1=2)
    job.come("n0", 1)
    job.connect(msgspec.structs.replace(hello("n1"), grant=2, digest="another"))
    assert job.reports[-1].refuses["n1"].grant == 2
    assert "script or arguments of node n1 differ" in job.reports[-1].refuses["n1"].why


def test_a_node_with_another_model_is_refused_to_the_pool_without_a_failure() -> None:
    job = pooled(1).train("n0")
    job.grants(n0=1, n1=2)
    job.connect(msgspec.structs.replace(hello("n1"), grant=2))
    job.deliver(attach(w("n1"), model="large"))
    assert job.reports[-1].refuses["n1"].grant == 2
    assert "model is large, the job's is small" in job.reports[-1].refuses["n1"].why
    assert job.held.numbers == {1}
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected | ev.NodeLeft)]


@pytest.mark.parametrize("leaving", [(1,), (1, 2)])
def test_a_job_keeps_its_last_node_although_it_is_recalled(leaving: tuple[int, ...]) -> None:
    job = pooled(1).train("n0")
    job.grants(leaving=leaving, n0=1)
    assert not job.machine.record.leaving
    for _ in range(5):
        job.tick(1.5)
        job.deliver_from("n0", msg.Heartbeat())
    assert job.held.numbers == {1}
