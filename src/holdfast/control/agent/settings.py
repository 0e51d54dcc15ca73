"""What an agent is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.control.agent.zygote import PRELOAD


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    """Settings of one agent.

    coordinator: http(s) URL. script: absolute path. folder: a private one, for sockets. digest: of script and
    arguments. zygote: socket of a shared one, "" for one of its own. environment: the whole environment of a zygote
    of its own. log_folder: for the workers' output, "" to inherit. cafile: certificates to trust, "" for the system's.
    parent: pid of the process to end with, 0 for none. slots: the node's room for expert replicas, per MoE layer.
    emulate_compute: seconds per token that expert computation is made to take, 0 for none. quiet: another process tells
    the user why the job ended. rack: nodes that may fail together have the same; "" for one of its own.
    """

    coordinator: str
    token: str
    job: str
    node: str
    script: str
    folder: str
    digest: str
    workers: int = 1
    host: str = "127.0.0.1"
    args: tuple[str, ...] = ()
    cwd: str = "/"
    zygote: str = ""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    preload: tuple[str, ...] = PRELOAD
    log_folder: str = ""
    checkpoint_dir: str = ""
    checkpoint_every: int = 100
    verify_state: bool = False
    slots: int = 6
    emulate_compute: float = 0.0
    cafile: str = ""
    parent: int = 0
    quiet: bool = False
    rack: str = ""
