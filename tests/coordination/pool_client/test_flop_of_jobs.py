"""Tests of FLOP per sample: counted by all asked ranks, reported once, and known to later coordinators."""

from __future__ import annotations

import msgspec
from machinery import Job, attach, hello, w

from holdfast.protocol import events as ev
from holdfast.protocol.job_spec import JobSpec, OutputSpec
from holdfast.protocol.messages import any_side as msg

EXPERTS = msg.ExpertShape(layers=1, experts=2, slots=2)


def tally(node: str, step: int, flop: float, samples: int = 4, generation: int = 1) -> msg.FlopTally:
    return msg.FlopTally(worker=w(node), generation=generation, step=step, flop=flop, samples=samples)


def counted(job: Job) -> list[tuple[int, float]]:
    return [(event.step, event.flop_per_sample) for event in job.events if isinstance(event, ev.FlopCounted)]


def with_experts(nodes: int) -> Job:
    job = Job(nodes=nodes).boot()
    names = [f"n{index}" for index in range(nodes)]
    for name in names:
        job.connect(hello(name))
        job.deliver(attach(w(name), experts=EXPERTS))
    for name in names:
        job.deliver(msg.Entered(worker=w(name), generation=1, applied=0))
    return job


def test_in_a_dense_job_the_count_of_one_rank_is_enough() -> None:
    job = Job(nodes=2).start()
    plan = job.machine.record.plan
    assert plan is not None
    first, second = map(msg.node_of, plan.workers)
    assert [plan.is_counting(worker) for worker in plan.workers] == [True, False]
    job.step(1)
    job.deliver(tally(second, 2, 900.0))
    assert not counted(job), "the rank was not asked"
    job.deliver(tally(first, 2, 400.0))
    job.deliver(tally(first, 2, 800.0))
    assert counted(job) == [(2, 100.0)]
    assert job.machine.record.flop_per_sample == 100.0


def test_with_experts_the_counts_of_all_ranks_in_one_step_are_added() -> None:
    job = with_experts(3)
    job.step(1)
    job.deliver(tally("n0", 2, 500.0))
    job.deliver(tally("n1", 2, 100.0))
    assert not counted(job)
    job.deliver(tally("n2", 2, 200.0, samples=0))
    assert counted(job) == [(2, 100.0)]


def test_counts_of_different_steps_are_not_added() -> None:
    job = with_experts(2)
    job.step(1)
    job.deliver(tally("n0", 2, 500.0))
    job.step(2)
    job.deliver(tally("n1", 3, 100.0))
    job.deliver(tally("n0", 2, 500.0, generation=0))
    assert not counted(job)
    job.deliver(tally("n0", 3, 300.0))
    assert counted(job) == [(3, 50.0)]


def test_a_declared_flop_count_is_not_measured() -> None:
    job = Job(nodes=1, spec=JobSpec(output=OutputSpec(flop_per_sample=7.0))).start()
    plan = job.machine.record.plan
    assert plan is not None
    assert not plan.counts_flop
    job.step(1)
    job.deliver(tally("n0", 2, 400.0))
    assert not counted(job)


def test_counts_without_flop_or_samples_are_ignored() -> None:
    job = Job(nodes=1).start()
    job.step(1)
    job.deliver(tally("n0", 2, 0.0))
    job.deliver(tally("n0", 2, 5.0, samples=0))
    assert not counted(job)


def test_a_later_coordinator_does_not_count_again() -> None:
    before = Job(nodes=1).start()
    before.step(1)
    before.deliver(tally("n0", 2, 400.0))
    job = Job(nodes=1, records=before.records, events=before.events, now=before.now + 1.0).boot(takeover=True)
    job.connect(hello("n0", (attach(w("n0")), msg.Entered(worker=w("n0"), generation=1, applied=1)), term=1))
    job.deliver(tally("n0", 2, 800.0))
    assert counted(job) == [(2, 100.0)]
    told = [event for event in job.events if isinstance(event, ev.CoordinatorRestarted)]
    assert [event.flop_per_sample for event in told] == [100.0]
    assert msgspec.structs.asdict(told[0])["peak_flop_per_s"] == 0.0
