"""What an agent is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.control.link.forking import PRELOAD
from holdfast.protocol.job_spec import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    """Settings of one agent.

    spec: the job, with its name and absolute paths; of it the script, the workers and what these are told count here.
    coordinator: http(s) URL. node: this node's name. folder: a private one, for sockets. digest: of script and
    arguments. advertise: the address at which the other nodes reach this one. zygote: socket of a shared one, "" for
    one of its own. environment: the whole environment of a zygote of its own. log_folder: for the workers' output, a
    file for each, "" for none; shows: whether it is printed as well. tls_ca: certificates to trust, "" for the
    system's. parent: pid of the process to end with, 0 for none. quiet: another process tells the user why the job
    ended. rack: nodes that may fail together have the same; "" for one of its own. zone: where its rack is, "" for
    none. failure_rate: how often the node fails, the usual one being 1. preflight: look whether the node is fit to
    train, before it joins. standby: it waits without a rank until one of the others is lost or moved. grant: by
    which the node is the job's in a pool, 0 where it runs in none.
    """

    spec: JobSpec
    coordinator: str
    token: str
    node: str
    folder: str
    digest: str
    advertise: str = "127.0.0.1"
    cwd: str = "/"
    zygote: str = ""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    preload: tuple[str, ...] = PRELOAD
    log_folder: str = ""
    shows: bool = True
    tls_ca: str = ""
    parent: int = 0
    quiet: bool = False
    rack: str = ""
    zone: str = ""
    failure_rate: float = 1.0
    preflight: bool = True
    standby: bool = False
    grant: int = 0
    #: Whether the node is part of a launched job, which ends with its launcher: no later agent uses its snapshots.
    of_run: bool = False

    @property
    def parts(self) -> str:
        """The folder in which workers hand over their parts of checkpoints, "" where none are kept."""
        return f"{self.folder}/{self.node}.parts" if self.spec.checkpoint.dir else ""
