"""Schedules of complete pools: the invariants hold, and schedules detect a wrong machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from holdfast.coordination.grants import apply_shares, update_roles
from holdfast.coordination.pool.fence import Fence, FenceInstruction, ReapGrant, StartGrant
from holdfast.coordination.pool.inputs import JobMessage, NodeDisconnected, PoolInput
from holdfast.coordination.pool.instructions import EmitPool, PersistPool, PoolInstruction, StartCoordinator
from holdfast.coordination.pool.pool import Pool
from holdfast.coordination.pool.share.interface import Bid
from holdfast.coordination.pool.share.policies import POLICIES
from holdfast.protocol.messages.pool import NodeGrant
from holdfast.protocol.pool.events import JobSuspended
from holdfast.protocol.pool.grants import Held
from holdfast.protocol.pool.record import PooledJob
from holdfast.protocol.pool.sharing import JobShares
from tests.simulation.pool.pool_around import PoolParts
from tests.simulation.pool.pool_cluster import PoolCluster
from tests.simulation.pool.pool_fuzzing import PoolTally, run_pools
from tests.simulation.pool.pool_plans import PoolFaultKind, pool_plan

#: The number of schedules within which a wrong machine must be detected.
MOST = 1500


def test_schedules_hold() -> None:
    tally = run_pools(range(80))
    assert tally.failed == {}
    assert tally.moved > 400
    assert tally.recalled > 20


def test_a_number_is_a_schedule() -> None:
    stories: list[list[str]] = []
    for _ in range(2):
        cluster = PoolCluster(pool_plan(7))
        cluster.run()
        stories.append([*cluster.world.story, *map(str, cluster.world.disk.journal)])
    assert stories[0] == stories[1]


def test_schedules_try_everything() -> None:
    plans = [pool_plan(number) for number in range(300)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(PoolFaultKind)
    assert {plan.policy for plan in plans} == set(POLICIES)
    assert {visit.what for plan in plans for job in plan.jobs for visit in job.visits} == {
        "suspend",
        "resume",
        "stop",
        "stop_now",
        "weight",
        "move",
        "compact",
    }
    assert {plan.together for plan in plans} == {True, False}
    assert any(plan.reserve for plan in plans)
    assert {plan.starves for plan in plans if plan.policy == "waf"} == {True, False}
    assert any(job.unfit for plan in plans for job in plan.jobs)
    assert any(job.spec.preemptible for plan in plans for job in plan.jobs)


@pytest.mark.parametrize("number", [950_201, 950_063, 950_117])
def test_weights_that_starve_let_no_job_go_to_and_fro(number: int) -> None:
    """Weights that starve jobs cause few suspensions.

    In the first schedule, a job replaced another with unfit nodes and was starved in turn, 201 times.
    """
    plan = dataclasses.replace(pool_plan(number), policy="waf", starves=True)
    cluster = PoolCluster(plan)
    cluster.run()
    suspended = [event.job for event in cluster.world.disk.journal if isinstance(event, JobSuspended)]
    assert max(map(suspended.count, suspended), default=0) <= 12


# ---- wrong machines ----


class TakesFromTheSilent(Pool):
    """A disconnected node loses its grant."""

    def handle(self, event: PoolInput, now: float) -> list[PoolInstruction]:
        if isinstance(event, NodeDisconnected) and (here := self.state.by_connection.get(event.connection)) is not None:
            grant = self.state.grants.get(here.name)
            if grant is not None:
                self.state.release_grant(grant, by="node")
        return super().handle(event, now)


class TellsFirst(Pool):
    """Messages are sent before the record is written."""

    def handle(self, event: PoolInput, now: float) -> list[PoolInstruction]:
        return sorted(super().handle(event, now), key=lambda one: isinstance(one, PersistPool | EmitPool))


class BelievesOldWords(Pool):
    """A job that has not yet received a grant counts as having returned it."""

    def handle(self, event: PoolInput, now: float) -> list[PoolInstruction]:
        if isinstance(event, JobMessage):
            event = JobMessage(event.job, replace(event.report, heard=1 << 40))
        return super().handle(event, now)


class BelievesEverySuspended(Pool):
    """A job that reports that it is suspended counts as having no nodes, even if it holds some."""

    def handle(self, event: PoolInput, now: float) -> list[PoolInstruction]:
        if isinstance(event, JobMessage) and event.report.standing == "suspended":
            event = JobMessage(event.job, replace(event.report, held=frozenset()))
        return super().handle(event, now)


class ShrinksTooFar(Pool):
    """Nodes are allocated as if one node were enough for each job."""

    def start(self, now: float, url: str, pid: int) -> list[PoolInstruction]:
        granting = self._allocator
        right = granting.build_bid

        def bid(job: PooledJob, nodes: int) -> Bid:
            correct = right(job, nodes)
            return Bid(**{**{name: getattr(correct, name) for name in Bid.__slots__}, "least": 1, "sizes": ()})

        granting.build_bid = bid
        return super().start(now, url, pid)


class ForgetsEvents(Pool):
    """Events that the journal lacks after a crash are not written again."""

    def start(self, now: float, url: str, pid: int) -> list[PoolInstruction]:
        self._lost = []
        return super().start(now, url, pid)


class ClosesLast(Pool):
    """A job that continues at once loses its new coordinator."""

    def handle(self, event: PoolInput, now: float) -> list[PoolInstruction]:
        out = super().handle(event, now)
        begun = [one for one in out if isinstance(one, StartCoordinator)]
        rest = [one for one in out if not isinstance(one, StartCoordinator)]
        place = next(
            (place for place, one in enumerate(rest) if not isinstance(one, PersistPool | EmitPool)), len(rest)
        )
        return [*rest[:place], *begun, *rest[place:]]


class LeavesJobsAlone(Pool):
    """A job's coordinator is not started again after the server has died."""

    def start(self, now: float, url: str, pid: int) -> list[PoolInstruction]:
        return [one for one in super().start(now, url, pid) if not isinstance(one, StartCoordinator)]


class StartsAtOnce(Fence):
    """The next grant's processes start while the old grant's processes are ending."""

    def on_grant(self, grant: NodeGrant) -> list[FenceInstruction]:
        out = super().on_grant(grant)
        if any(isinstance(one, ReapGrant) for one in out) and grant.grant:
            self.running = grant.grant
            out.append(StartGrant(grant.grant, grant.job, grant.submission))
        return out


class StartsTwice(Fence):
    """An ended grant starts again, if the pool has not learned of its end."""

    def on_reaped(self, grant: int) -> list[FenceInstruction]:
        out = super().on_reaped(grant)
        if self._newest.grant == grant:
            self.running = grant
            out.append(StartGrant(grant, self._newest.job, self._newest.submission))
        return out


class NeverReaps(Fence):
    """A node without a grant keeps its processes."""

    def on_grant(self, grant: NodeGrant) -> list[FenceInstruction]:
        return super().on_grant(grant) if grant.grant else []


def takes_again(held: Held, shares: JobShares, now: float) -> Held:
    """Accept a grant that the job has returned."""
    return replace(apply_shares(replace(held, returned=frozenset()), shares, now), returned=held.returned)


def reports_each_role_at_once(held: Held, nodes: Mapping[str, bool], _joining: Mapping[str, str]) -> Held:
    """Report a standby that joins next to another node as an additional node, before that node waits."""
    return update_roles(held, nodes, {})


def follows_changes_only(held: Held, shares: JobShares, now: float) -> Held:
    """Follow the pool's call to a standby only if the pool's previous message had the node as a standby."""
    known = {node: grant.role_version for node, grant in held.grants.items()}
    waited = _told_to_wait.get(held.submission, frozenset[int]())
    _told_to_wait[held.submission] = shares.standbys
    versions = {
        node: version if shares.grants[node] in waited or node not in known else known[node]
        for node, version in shares.role_versions.items()
    }
    return apply_shares(held, replace(shares, role_versions=versions), now)


#: The standby grants in the pool's newest message, by submission.
_told_to_wait: dict[int, frozenset[int]] = {}

WRONG = {
    "reports_each_role_at_once": PoolParts(update_roles=reports_each_role_at_once),
    "follows_changes_only": PoolParts(apply_shares=follows_changes_only),
    "takes_from_the_silent": PoolParts(pool=TakesFromTheSilent),
    "tells_first": PoolParts(pool=TellsFirst),
    "believes_old_words": PoolParts(pool=BelievesOldWords),
    "believes_every_suspended": PoolParts(pool=BelievesEverySuspended),
    "shrinks_too_far": PoolParts(pool=ShrinksTooFar),
    "forgets_events": PoolParts(pool=ForgetsEvents),
    "closes_last": PoolParts(pool=ClosesLast),
    "leaves_jobs_alone": PoolParts(pool=LeavesJobsAlone),
    "starts_at_once": PoolParts(fence=StartsAtOnce),
    "starts_twice": PoolParts(fence=StartsTwice),
    "never_reaps": PoolParts(fence=NeverReaps),
    "takes_again": PoolParts(apply_shares=takes_again),
}


#: Schedules that detect a machine that few schedules detect; they run first.
RARE = {
    "believes_every_suspended": 530,
    "follows_changes_only": 260,
    "reports_each_role_at_once": 160,
    "tells_first": 90,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pool_is_detected(name: str) -> None:
    tally = PoolTally()
    for first in (RARE.get(name, 0), *range(0, MOST, 10)):
        tally.add(run_pools(range(first, first + 10), WRONG[name]))
        if tally.failed:
            break
    assert tally.failed, f"{name} was not detected by {tally.schedules} schedules"
    assert any(why.startswith("InvariantError") for why in tally.failed.values()), tally.failed
