"""The settings of a job's coordination."""

from __future__ import annotations

from dataclasses import dataclass

#: What becomes of the others when a node fails.
RECONFIGURE, RESTART = "reconfigure", "restart"


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """Settings of a job's coordination; times in seconds.

    start_nodes: how many nodes must have come before the first generation; later any number will do.
    join_window_s: nobody is taken in before this long after the last arrival; join_retry_s: after a failed attempt.
    fault_threshold: on how many distinct nodes each expert should live. strategy: of expert placement.
    static_experts, ep_size: classic expert parallelism instead of elastic experts, over so many ranks (0: the least
    that fits). on_failure: `reconfigure` the job, or `restart` all workers from the newest checkpoint, at joins too.
    emulate_compute: seconds per token that expert computation is made to take, 0 for none; for the record.
    rebalance_every: steps from one look at the experts' placement to the next, 0 for none; loads bring the first one.
    save_timeout_s: how long a job that is to end may take to save what it has led to.
    secret: what the keys of state transfers are derived from. takeover: another coordinator of the same run died
    before; an outcome that it wrote stands. Without it a store with an outcome is the begin of another run.
    """

    job: str
    start_nodes: int = 1
    lease_s: float = 3.0
    heartbeat_s: float = 0.5
    tick_s: float = 0.1
    report_timeout_s: float = 5.0
    prepare_timeout_s: float = 30.0
    join_window_s: float = 0.0
    join_retry_s: float = 1.0
    save_timeout_s: float = 30.0
    fault_threshold: int = 2
    strategy: str = "best"
    static_experts: bool = False
    ep_size: int = 0
    on_failure: str = RECONFIGURE
    emulate_compute: float = 0.0
    rebalance_every: int = 200
    allow_faults: bool = False
    secret: bytes = b""
    takeover: bool = False
