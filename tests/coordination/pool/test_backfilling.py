"""Tests of backfilling: the first queued job starts no later than its reservation, despite jobs started before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.pool.share.admission import admit, compute_reservation
from holdfast.coordination.pool.share.interface import Bid


def need(bid: Bid) -> int:
    return bid.least


def bid(order: int, nodes: int, limit_s: float = inf) -> Bid:
    return Bid(name=f"j{order}", order=order, least=nodes, most=nodes, limit_s=limit_s)


def running(order: int, nodes: int, ends_by: float = inf) -> Bid:
    return replace(bid(order, nodes), has=nodes, admitted=True, ends_by=ends_by)


def test_a_job_that_ends_in_time_is_started_before_the_first() -> None:
    found = admit([bid(2, 6), bid(3, 2, limit_s=5.0)], [running(1, 4, ends_by=10.0)], 8, need, now=0.0)
    assert found.names == ("j3",)


def test_a_job_that_may_run_too_long_waits_with_a_reason() -> None:
    found = admit([bid(2, 6), bid(3, 3, limit_s=15.0)], [running(1, 4, ends_by=10.0)], 8, need, now=0.0)
    assert found.names == ()
    assert found.why["j3"] == "j2 is before it: it may still run when that can begin"


def test_a_job_without_a_time_limit_uses_nodes_the_first_will_not_need() -> None:
    found = admit([bid(2, 6), bid(3, 2), bid(4, 1)], [running(1, 4, ends_by=10.0)], 8, need, now=0.0)
    assert found.names == ("j3",), "two nodes are left over at 10 s, but not a third"


def test_no_job_is_backfilled_if_the_start_of_the_first_is_unknown() -> None:
    assert admit([bid(2, 6), bid(3, 1, limit_s=1.0)], [running(1, 4)], 8, need, now=0.0).names == ()


def test_jobs_that_end_simultaneously_all_add_to_the_spare_nodes() -> None:
    assert compute_reservation(5, 1, [(10.0, 4), (10.0, 3), (20.0, 1)], 0.0).spare == 3


@dataclass(slots=True)
class Submitted:
    at: float
    bid: Bid
    takes_s: float


@st.composite
def days(draw: st.DrawFn) -> list[Submitted]:
    """Return jobs that end at their time limits or before."""
    jobs: list[Submitted] = []
    for order in range(1, draw(st.integers(2, 12)) + 1):
        limit_s = float(draw(st.integers(1, 30)))
        endless = draw(st.integers(0, 5)) == 0
        nodes = draw(st.integers(1, 8))
        jobs.append(
            Submitted(
                at=float(draw(st.integers(0, 20))),
                bid=bid(order, nodes, inf if endless else limit_s),
                takes_s=draw(st.integers(1, int(limit_s))),
            )
        )
    return sorted(jobs, key=lambda job: job.at)


@given(days())
def test_a_job_never_starts_later_than_its_earliest_reservation(jobs: list[Submitted]) -> None:
    """Simulate a whole day of a pool of eight nodes, event by event."""
    jobs = [replace(job, bid=replace(job.bid, order=place)) for place, job in enumerate(jobs)]
    ends: dict[str, float] = {}
    live: dict[str, Bid] = {}
    queue: list[Submitted] = []
    promised: dict[str, float] = {}
    begun: dict[str, float] = {}
    coming = list(jobs)
    while coming or queue or live:
        now = min([job.at for job in coming[:1]] + [ends[name] for name in live])
        for name in [name for name in live if ends[name] <= now]:
            del live[name]
        while coming and coming[0].at <= now:
            queue.append(coming.pop(0))
        bids = [job.bid for job in sorted(queue, key=lambda job: job.bid.order)]
        found = admit(bids, list(live.values()), 8, need, now)
        assert sum(need(one) for one in live.values()) <= 8
        for job in [job for job in queue if job.bid.name in found.names]:
            name = job.bid.name
            live[name] = replace(job.bid, admitted=True, has=need(job.bid), ends_by=now + job.bid.limit_s)
            ends[name] = now + job.takes_s
            begun[name] = now
            assert now <= promised.get(name, inf), f"{name} was to begin by {promised[name]}"
            queue.remove(job)
        if queue:
            head = min(queue, key=lambda job: job.bid.order).bid
            free = 8 - sum(need(one) for one in live.values())
            kept = compute_reservation(need(head), free, [(one.ends_by, need(one)) for one in live.values()], now)
            assert kept.at <= promised.get(head.name, inf), "backfilling has delayed it"
            promised[head.name] = min(promised.get(head.name, inf), kept.at)
    assert begun.keys() == {job.bid.name for job in jobs}, "no job starves"
