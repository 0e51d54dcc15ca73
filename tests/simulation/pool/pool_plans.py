"""The random plan of a simulated pool, drawn from a number: jobs, user requests and faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from holdfast.coordination.pool.share.policies import POLICIES
from holdfast.protocol.job_spec import CheckpointSpec, JobSpec, RecoverySpec

#: The time after which there are no faults and no user requests, so all jobs must end.
QUIET_S = 120.0


#: A sequence of requests; `_GAPS` has the time of each after the first, in seconds.
_TO_AND_FRO = ("suspend", "resume", "suspend", "resume")
_ASKED = ("suspend", "resume", "stop", "stop_now", "weight", "move", "compact")
_GAPS = (0.0, 4.0, 4.1, 9.0)


class PoolFaultKind(StrEnum):
    """The kinds of faults of a pool."""

    NODE_DIES = "node_dies"
    NODE_CUT_FROM_POOL = "node_cut_from_pool"
    NODE_CUT_FROM_JOBS = "node_cut_from_jobs"
    SERVER_DIES = "server_dies"
    SERVER_USURPED = "server_usurped"
    JOB_DIES = "job_dies"
    JOB_CUT_FROM_POOL = "job_cut_from_pool"
    NODE_DRAINED = "node_drained"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFault:
    """A fault at a time, with its duration; `who` selects one of the possible targets."""

    kind: PoolFaultKind
    at: float
    lasts_s: float
    who: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """A user's request: suspend, resume, stop, stop_now, weight, move or compact."""

    at: float
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """A job with its submission time, its work in seconds of one node, and the nodes that are unfit for it."""

    spec: JobSpec
    at: float
    work_s: float
    unfit: frozenset[str] = frozenset()
    visits: tuple[Visit, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """One schedule.

    `crashes` has the writes before which the server or a job's coordinator dies, by its name. `together` puts the
    coordinators into the server's process, so that they die with it. `starves` is an option of the policy `waf`.
    """

    seed: int
    policy: str
    nodes: int
    reserve: int
    jobs: tuple[PlannedJob, ...]
    faults: tuple[PoolFault, ...]
    crashes: Mapping[str, frozenset[int]]
    together: bool
    starves: bool = False


def pool_plan(seed: int) -> PoolPlan:
    """Return the schedule with this number."""
    rng = Random(f"pool {seed}")
    nodes, policy = rng.randint(1, 8), rng.choice(sorted(POLICIES))
    reserve = rng.choice((0, 0, 0, 1, 2)) if nodes > 3 else 0
    jobs = tuple(_job(rng, number, nodes - reserve, policy) for number in range(1, rng.randint(1, 6) + 1))
    faults = tuple(_fault(rng) for _ in range(rng.choice((0, 1, 2, 4, 8))))
    crashes = {
        who: frozenset(rng.sample(range(1, 60), rng.choice((0, 1, 3))))
        for who in ("pool", *(job.spec.name for job in jobs))
    }
    return PoolPlan(
        seed=seed,
        policy=policy,
        nodes=nodes,
        reserve=reserve,
        jobs=jobs,
        faults=faults,
        crashes=crashes,
        together=rng.random() < 0.7,
        starves=policy == "waf" and rng.random() < 0.5,
    )


def _job(rng: Random, number: int, room: int, policy: str) -> PlannedJob:
    preemptible = rng.random() < 0.2
    least = rng.randint(1, max(1, min(4, room)))
    most = rng.randint(least, room if policy == "sized" else 8) if room > least else least
    sizes = tuple(sorted({least, *rng.sample(range(least, most + 1), rng.randint(0, most - least))}))
    work_s = rng.choice((10.0, 60.0, 250.0)) * rng.uniform(0.5, 1.5)
    visits = [Visit(at=rng.uniform(0.0, QUIET_S), what=rng.choice(_ASKED)) for _ in range(rng.choice((0, 0, 1, 3)))]
    if rng.random() < 0.4:  # A user suspends and resumes the job repeatedly.
        since = rng.uniform(0.0, QUIET_S * 0.8)
        visits += [Visit(at=since + gap, what=what) for gap, what in zip(_GAPS, _TO_AND_FRO, strict=True)]
    spec = JobSpec(
        name=f"job{number}",
        min_nodes=least,
        max_nodes=most,
        sizes=sizes if rng.random() < 0.25 else (),
        weight=rng.choice((0.5, 1.0, 2.0)),
        priority=rng.randint(-1, 1),
        preemptible=preemptible,
        snooze=rng.choice((0.0, 0.0, 5.0)),
        time_limit=rng.choice((0.0, 0.0, work_s * rng.uniform(0.3, 3.0))),
        checkpoint=CheckpointSpec(dir="/kept"),
        recovery=RecoverySpec(standbys=rng.choice((0, 0, 0, 1, 2))),
    )
    at = rng.uniform(0.0, QUIET_S * rng.choice((0.1, 0.3, 0.7))) if rng.random() < 0.8 else 0.0
    some = 0.4 if rng.random() < 0.3 else 0.0
    unfit = frozenset(f"n{node}" for node in range(1, 9) if rng.random() < some)
    return PlannedJob(
        spec=spec, at=at, work_s=work_s, unfit=unfit, visits=tuple(sorted(visits, key=lambda visit: visit.at))
    )


def _fault(rng: Random) -> PoolFault:
    return PoolFault(
        kind=rng.choice(list(PoolFaultKind)),
        at=rng.uniform(0.0, QUIET_S * 0.8),
        lasts_s=rng.choice((0.3, 2.0, 6.0, 20.0)) * rng.uniform(0.5, 1.5),
        who=rng.randrange(64),
    )
