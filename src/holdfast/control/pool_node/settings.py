"""What a pool's node is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.control.link.forking import PRELOAD


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolNodeSettings:
    """One node of a pool.

    pool: the pool's http(s) URL. token: what it is shown. node: this node's name. folder: a private one, for sockets.
    advertise, rack, zone, failure_rate, tls_ca, environment, log_folder, preload, parent: as of `AgentSettings`.
    workers: a job with more on a node than these finds this one unfit; 0: any number. grace_s: so long the node stays
    once it is told to end, for its job to leave it in good order. passing: its name is of this process alone. shows:
    whether what workers print is printed.
    """

    pool: str
    token: str
    node: str
    folder: str
    advertise: str = "127.0.0.1"
    rack: str = ""
    zone: str = ""
    failure_rate: float = 1.0
    tls_ca: str = ""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    log_folder: str = ""
    workers: int = 0
    grace_s: float = 0.0
    passing: bool = False
    shows: bool = True
    preload: tuple[str, ...] = PRELOAD
    parent: int = 0
    log: str = "warning"
