"""The settings of one coordinator."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from holdfast.protocol.failures import FailureRule
from holdfast.protocol.job_spec import JobSpec

#: Heartbeats that a coordinator process handles per second, for all nodes of its jobs, as far as leases allow.
BEATS_PER_S = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class PeriodBounds:
    """Bounds of the period of saves, in seconds."""

    #: When the first save is due, before any time was measured.
    first_s: float = 60.0
    #: The shortest period.
    least_s: float = 10.0
    #: The longest period.
    most_s: float = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """Settings of a coordinator; times in seconds."""

    #: The job. The coordinator uses its name, number of nodes, experts, recovery and experiments.
    spec: JobSpec
    #: The site's own failure classes, from `spec.recovery.failure_classes`.
    rules: tuple[FailureRule, ...] = ()
    lease_s: float = 3.0
    heartbeat_s: float = 0.5
    tick_s: float = 0.1
    report_timeout_s: float = 5.0
    prepare_timeout_s: float = 30.0
    #: After a failed join, no newcomer is admitted for this time.
    join_retry_s: float = 1.0
    #: Bounds of the period of saves if the user gave none.
    period: PeriodBounds = field(default_factory=PeriodBounds)
    #: How long a closing job may take to save its state.
    save_timeout_s: float = 30.0
    #: How long the warm-up of a standby may take.
    warm_timeout_s: float = 300.0
    #: How long a newcomer and a member may take to connect to each other, before the newcomer is admitted.
    probe_timeout_s: float = 5.0
    #: Another layout must be better for this time before the job changes to it, and longer after a recent change.
    layout_settle_s: float = 2.0
    #: A layout change is given up if the state is not stashed within this time.
    layout_timeout_s: float = 120.0
    #: How long a node with the only copy of stashed state may take to reconnect with new processes.
    return_timeout_s: float = 30.0
    #: How many workers report each step; 0 for the number from `witnesses_wanted`.
    witnesses: int = 0
    #: The job's number in its pool, 0 outside a pool.
    submission: int = 0
    #: How long a granted node may take to connect.
    grant_join_s: float = 60.0
    #: The number of nodes in the pool if its server also runs this coordinator, else 0.
    pool_nodes: int = 0
    #: A random name that no other job has, for a record without one.
    identity: str = ""
    #: The secret from which the keys of state transfers are derived.
    secret: bytes = b""
    #: Whether another coordinator of the same run died before. Then an outcome in the store ends this run, too;
    #: otherwise the outcome is of an earlier run.
    takeover: bool = False

    def plan_secret(self, born: float, term: int, generation: int) -> bytes:
        """Return the secret by which members of a generation authenticate to each other.

        Args:
            born: the start time in the job's record: another run under the same name may have the same `secret`.
        """
        return hashlib.sha256(self.secret + f"/{born}/{term}/{generation}".encode()).digest()

    def snapshot_key(self, born: float) -> bytes:
        """Return the key by which readers of snapshots authenticate to agents."""
        return hashlib.sha256(self.secret + f"/{born}/snapshots".encode()).digest()

    def beat_s(self, nodes: int) -> float:
        """Return the interval of a node's heartbeats in seconds, in a job of this many nodes.

        It grows in large jobs, so that all nodes together, of the job or of its pool, send at most `BEATS_PER_S`. Each
        node still sends at least three heartbeats in a lease.
        """
        return max(self.heartbeat_s, min(max(nodes, self.pool_nodes) / BEATS_PER_S, self.lease_s / 3))
