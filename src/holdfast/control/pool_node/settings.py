"""The settings of a pool's node."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.control.link.forking import PRELOAD


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolNodeSettings:
    """The settings of one node of a pool. Fields without a comment are as in `AgentSettings`."""

    #: http(s) URL of the pool
    pool: str
    #: token for the pool
    token: str
    #: name of this node
    node: str
    #: a private folder, for sockets
    folder: str
    advertise: str = "127.0.0.1"
    rack: str = ""
    zone: str = ""
    failure_rate: float = 1.0
    tls_ca: str = ""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    log_folder: str = ""
    #: jobs with more workers per node than this find the node unfit; 0: any number
    workers: int = 0
    #: seconds that the node stays after a signal to end, so that its job can drain it
    grace_s: float = 0.0
    #: whether the name of the node is used by this process only, and is forgotten after it
    passing: bool = False
    #: whether to print the output of workers
    shows: bool = True
    preload: tuple[str, ...] = PRELOAD
    parent: int = 0
    log: str = "warning"
