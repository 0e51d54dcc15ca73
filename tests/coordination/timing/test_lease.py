"""Tests of leases learned from the gaps between a node's messages."""

from __future__ import annotations

import math

import pytest
from machinery import Job, hello

from holdfast.coordination.membership import Membership
from holdfast.coordination.timing.lease import WINDOW_S, least_lease_s
from holdfast.coordination.timing.times import FAILURE, FLOOR_S
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg

NODES = ("n0", "n1", "n2")


def lasts_s(*gaps: float) -> float:
    """Return the lease of a node after messages with these gaps, each handled in time."""
    members, now = Membership(), 1000.0
    node = members.add(hello("n0"), 1, now)
    for gap in gaps:
        now += gap
        members.renew(1, now)
        assert members.expired(now, 3.0, 1.7) == []
    return node.lease.lasts_s


@pytest.mark.parametrize(
    ("gaps", "longest"),
    [
        ([0.5] * 59, math.inf),  # nothing is learned within the first half minute
        ([0.5] * 60, 0.5),
        ([0.5] * 60 + [0.75], 0.75),
        ([0.5] * 60 + [0.75] + [0.5] * 58, 0.75),
        ([0.5] * 60 + [0.75] + [0.5] * 130, 0.5),
    ],
)
def test_the_lease_is_three_times_the_longest_recent_gap(gaps: list[float], longest: float) -> None:
    assert lasts_s(*gaps) == FAILURE * longest + FLOOR_S


def test_the_least_lease_follows_the_heartbeat_period() -> None:
    assert least_lease_s(3.0, 0.5) == FAILURE * 0.5 + FLOOR_S
    assert least_lease_s(1.0, 0.5) == 1.0


def calm(*silent: str, seconds: float, job: Job | None = None, every: int = 5) -> Job:
    """Advance the time while all nodes but the silent ones send a heartbeat at every `every`-th tick."""
    job = Job().start() if job is None else job
    for number in range(round(seconds / 0.1)):
        job.tick(0.1)
        for node in NODES if number % every == 0 else ():
            if node not in silent:
                job.deliver_from(node, msg.Heartbeat())
    return job


def test_a_silent_node_is_lost_sooner_with_a_learnt_lease() -> None:
    job = calm(seconds=WINDOW_S + 1.0)
    calm("n1", seconds=2.0, job=job)
    (lost,) = [event for event in job.events if isinstance(event, ev.FailureDetected)]
    assert (lost.node, lost.kind) == ("n1", "lease_expired")
    early = calm("n1", seconds=2.5)
    assert not [event for event in early.events if isinstance(event, ev.FailureDetected)]


def test_a_node_with_frequent_messages_is_not_lost_for_one_late_heartbeat() -> None:
    job = calm(seconds=WINDOW_S + 1.0, every=1)
    calm("n1", seconds=1.5, job=job)
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]


def test_a_coordinator_that_was_paused_does_not_apply_the_learnt_lease() -> None:
    job = calm(seconds=WINDOW_S + 1.0)
    job.tick(1.4)
    for _ in range(5):
        job.tick(0.1)
    assert not [event for event in job.events if isinstance(event, ev.FailureDetected)]
