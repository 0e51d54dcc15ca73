"""Tests of placement searches: requested after every repair, adopted if they survive more failures, never awaited."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from loaded_job import loads, moe_job
from machinery import Job, applied, attach, hello, w

from holdfast.coordination.experts.searching import PlacementAnswer, PlacementSearch
from holdfast.coordination.inputs import Planned
from holdfast.coordination.instructions import PlanExperts
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg

#: two of six nodes are lost in turn: the repaired placement survives fewer failures than the one a search finds
SHAPE = msg.ExpertShape(layers=2, experts=8, slots=6)


def searches(job: Job) -> list[PlacementSearch]:
    return [order.search for order in job.last if isinstance(order, PlanExperts)]


def lose(job: Job, *nodes: str) -> msg.GenerationPlan:
    """Lose nodes; the others report their experts and enter the next generation. Return its plan."""
    before = job.records[-1].plan
    assert before is not None
    assert before.expert_plan is not None
    held = dict(zip(before.workers, before.expert_plan.placement, strict=True))
    for node in nodes:
        job.lose(node)
    for worker in before.workers:
        if msg.node_of(worker) not in nodes:
            job.report(msg.node_of(worker), 0, state=msg.Holding(experts=held[worker]))
    plan = job.records[-1].plan
    assert plan is not None
    for worker in plan.workers:
        job.deliver(msg.Entered(worker=worker, generation=plan.generation, applied=0))
    return plan


def repaired_job(*, every: int = 200) -> tuple[Job, PlacementSearch]:
    job = moe_job(6, SHAPE, rebalance_every=every)
    lose(job, "n5")
    lose(job, "n4")
    (search,) = searches(job)
    return job, search


@pytest.mark.parametrize("every", [0, 200])
def test_a_repair_is_followed_by_a_search_even_without_loads(every: int) -> None:
    job, search = repaired_job(every=every)
    assert (search.generation, search.repaired, search.question.loads) == (3, True, b"")
    plan = job.records[-1].plan
    assert plan is not None
    assert plan.expert_plan is not None
    assert search.question.held == plan.expert_plan.placement
    job.tick(0.1)
    assert not searches(job), "each repair leads to one search"


def test_a_placement_that_survives_more_failures_is_adopted_at_a_step_boundary() -> None:
    job, search = repaired_job()
    found = search.solve()
    assert found is not None
    assert found.adopt
    assert "of losses would be fatal to the mended placement" in found.why
    job.feed(Planned(search.generation, found))
    pending = job.records[-1].pending
    assert pending is not None
    assert pending.expert_plan == msgspec.structs.replace(found.experts, beside=True)
    assert not found.experts.repaired, "the placement needs no further search"
    assert [decided.adopted for decided in job.emitted(ev.RebalanceDecided)] == [True]


def test_a_serialized_search_returns_the_same_answer() -> None:
    """The search and its answer are passed between processes as bytes."""
    _, search = repaired_job()
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(search), type=PlacementSearch)
    assert there == search
    found = there.solve()
    assert found == search.solve()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=PlacementAnswer) == found


def test_a_search_answer_during_a_join_does_not_change_the_pending_plan() -> None:
    job, search = repaired_job()
    found = search.solve()
    job.connect(hello("n6"))
    job.deliver(attach(w("n6"), experts=SHAPE))
    pending = job.records[-1].pending
    assert pending is not None
    job.feed(Planned(search.generation, found))
    assert job.records[-1].pending == pending
    assert not job.emitted(ev.RebalanceDecided)


def test_a_search_answer_during_a_join_is_evaluated_after_the_join_is_void() -> None:
    """The job behaves as if the answer had come later."""
    job, search = repaired_job()
    found = search.solve()
    plan = job.records[-1].plan
    assert found is not None
    assert plan is not None
    job.connect(hello("n6"))
    job.deliver(attach(w("n6"), experts=SHAPE))
    assert job.records[-1].pending is not None
    job.feed(Planned(search.generation, found))
    job.lose("n6")  # the pending generation was not armed, so it is void
    pending = job.records[-1].pending
    assert pending is not None
    assert pending.workers == plan.workers
    assert pending.expert_plan == msgspec.structs.replace(found.experts, beside=True)


def test_the_next_failure_replaces_an_unfinished_search() -> None:
    job, first = repaired_job()
    plan = lose(job, "n3")
    (second,) = searches(job)
    assert (second.generation, second.question.workers) == (plan.generation, plan.workers)
    job.feed(Planned(first.generation, first.solve()))
    assert not job.emitted(ev.RebalanceDecided)
    job.feed(Planned(second.generation, second.solve()))
    assert len(job.emitted(ev.RebalanceDecided)) == 1


def test_a_failed_search_changes_nothing_until_the_next_evaluation() -> None:
    job, search = repaired_job(every=10)
    job.feed(Planned(search.generation, None))
    assert job.kinds == []
    plan = job.records[-1].plan
    assert plan is not None
    job.deliver(loads(np.ones((2, 8)), generation=3, step=1))
    found: list[PlacementSearch] = []
    for worker in plan.workers * 2:
        step = 1 if len(found) == 0 and job.machine.context.ledger.committed == 0 else 2
        job.deliver(applied(worker, 3, step, world=len(plan.members)))
        found += searches(job)
    (again,) = found
    assert (again.generation, again.repaired) == (3, True)
    assert again.question.loads


def test_a_new_coordinator_repeats_the_search_after_a_repair() -> None:
    job, search = repaired_job()
    plan = job.records[-1].plan
    assert plan is not None
    job.boot(takeover=True)
    for worker in plan.workers:
        entered = msg.Entered(worker=worker, generation=3, applied=0)
        job.connect(msgspec.structs.replace(hello(msg.node_of(worker)), kept=(attach(worker, experts=SHAPE), entered)))
    assert searches(job) == [search]
