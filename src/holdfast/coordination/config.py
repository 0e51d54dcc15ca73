"""The settings of a job's coordination."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from holdfast.protocol.failures import FailureRule
from holdfast.protocol.job_spec import JobSpec

#: heartbeats that a process hears in a second, of all its jobs' nodes, as far as leases allow
BEATS_PER_S = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class PeriodBounds:
    """When saves are due, in seconds: the first, before anything was measured; two apart at the least, at the most."""

    first_s: float = 60.0
    least_s: float = 10.0
    most_s: float = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """Settings of a job's coordination; times in seconds.

    spec: the job, with its name; of it the nodes to begin with, the experts, recovery and the experiments count here.
    rules: the site's own classes of failures, as `spec.recovery.failure_classes` has them.
    join_retry_s: nobody is taken in before this long after a failed attempt.
    witnesses: how many workers tell of a step as it passes; 0: as `witnesses_wanted` says.
    period: of saves where their times are not given. save_timeout_s: how long a job that is to end may take to save
    what it has led to. warm_timeout_s: how long the warm-up of a standby may take. probe_timeout_s: how long a newcomer
    and a member may take to connect to each other, before the newcomer is let in.
    layout_settle_s: another layout is taken once it has been the better one for so long, and longer where the last
    change was lately. layout_timeout_s: the state is put away for it within this time, or it stays as it is.
    return_timeout_s: so long a node that alone has some of that may take to come back, with many processes to start.
    submission: the job's number in its pool, 0 outside of pools. grant_join_s: a node that was granted has so long to
    come. pool_nodes: of the pool whose server has this coordinator, as it has those of all other jobs.
    identity: of a job whose record has none yet: a random name that no other job has.
    secret: what the keys of state transfers are derived from. takeover: another coordinator of the same run died
    before; an outcome that it wrote stands. Without it a store with an outcome is the begin of another run.
    """

    spec: JobSpec
    rules: tuple[FailureRule, ...] = ()
    lease_s: float = 3.0
    heartbeat_s: float = 0.5
    tick_s: float = 0.1
    report_timeout_s: float = 5.0
    prepare_timeout_s: float = 30.0
    join_retry_s: float = 1.0
    period: PeriodBounds = field(default_factory=PeriodBounds)
    save_timeout_s: float = 30.0
    warm_timeout_s: float = 300.0
    probe_timeout_s: float = 5.0
    layout_settle_s: float = 2.0
    layout_timeout_s: float = 120.0
    return_timeout_s: float = 30.0
    witnesses: int = 0
    submission: int = 0
    grant_join_s: float = 60.0
    pool_nodes: int = 0
    identity: str = ""
    secret: bytes = b""
    takeover: bool = False

    def plan_secret(self, born: float, term: int, generation: int) -> bytes:
        """Return what the members of a generation prove to each other that they know.

        Args:
            born: of the job's record: another run under the same name may have the same `secret`.
        """
        return hashlib.sha256(self.secret + f"/{born}/{term}/{generation}".encode()).digest()

    def snapshot_key(self, born: float) -> bytes:
        """Return what the readers of snapshots prove to the nodes' agents that they know."""
        return hashlib.sha256(self.secret + f"/{born}/snapshots".encode()).digest()

    def beat_s(self, nodes: int) -> float:
        """Return how often an agent is to say that its node lives, in seconds.

        Many are to say so more seldom, `BEATS_PER_S` together, but each three times in a lease.
        """
        return max(self.heartbeat_s, min(max(nodes, self.pool_nodes) / BEATS_PER_S, self.lease_s / 3))
