"""The settings of an agent, given at its start."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.control.link.forking import PRELOAD
from holdfast.protocol.job_spec import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    """Settings of one agent."""

    #: the job, with its name and absolute paths
    spec: JobSpec
    #: http(s) URL of the coordinator
    coordinator: str
    token: str
    #: name of this node
    node: str
    #: a private folder, for sockets
    folder: str
    #: of the script and its arguments
    digest: str
    #: address at which the other nodes reach this one
    advertise: str = "127.0.0.1"
    cwd: str = "/"
    #: socket of a shared zygote, or "" to start one
    zygote: str = ""
    #: the whole environment of a zygote that the agent starts
    environment: dict[str, str] = field(default_factory=dict[str, str])
    #: modules that such a zygote imports
    preload: tuple[str, ...] = PRELOAD
    #: folder for the output of workers, a file for each, or ""
    log_folder: str = ""
    #: whether to print the output of workers
    shows: bool = True
    #: certificates to trust, or "" for the system's
    tls_ca: str = ""
    #: pid of the process with which the agent ends, or 0
    parent: int = 0
    #: whether another process tells the user why the job ended
    quiet: bool = False
    #: the same for nodes that may fail together; "" for a rack of its own
    rack: str = ""
    #: location of the rack, or ""
    zone: str = ""
    #: how often the node fails, relative to a usual node
    failure_rate: float = 1.0
    #: whether to check that the node is fit, before it joins
    preflight: bool = True
    #: whether the node waits without a rank until another one is lost or moved
    standby: bool = False
    #: number of the pool's grant of this node to the job, or 0 without a pool
    grant: int = 0
    #: Whether the node is part of a launched job, which ends with its launcher: no later agent uses its snapshots.
    of_run: bool = False

    @property
    def parts(self) -> str:
        """The folder in which workers hand over their parts of checkpoints, "" if the job keeps none."""
        return f"{self.folder}/{self.node}.parts" if self.spec.checkpoint.dir else ""
