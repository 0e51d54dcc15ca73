"""What a job on this machine is started with, and what of it is refused before anything is touched."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.control.agent.zygote import PRELOAD
from holdfast.control.registry import check_name
from holdfast.control.store.choose import check_store
from holdfast.coordination.config import RECONFIGURE, RESTART
from holdfast.errors import BadInputError

#: `planning.strategies` by name, without its imports
STRATEGIES = ("best", "mro", "spread", "compact")
_MAX_NODES = 1024
_MAX_SLOTS = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """Settings of `holdfast run` and `holdfast replay`.

    script: as the user gave it. nodes: how many the job starts with; node_names: theirs, () for node-0, node-1, ...
    store: "" for SQLite in the job's folder. registry: where commands find the job; None for nowhere. job_dir: where
    the job's files stay; None for a temporary folder. environment: of all processes. log_folder: for the workers'
    output, None to let it through. zygote: the socket of one that runs already, and outlives the job. slots: each
    node's room for expert replicas, per MoE layer. fault_threshold: on how many nodes each expert is wanted. strategy:
    of the placement. join_window: seconds to wait for more arrivals. rebalance_every, static_experts, ep_size,
    on_failure, emulate_compute: see CoordinatorConfig.
    """

    script: Path
    args: tuple[str, ...] = ()
    nodes: int = 4
    node_names: tuple[str, ...] = ()
    workers_per_node: int = 1
    job: str = ""
    events: Path | None = None
    store: str = ""
    port: int = 0
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 100
    allow_faults: bool = False
    verify_state: bool = False
    slots: int = 6
    fault_threshold: int = 2
    strategy: str = "best"
    rebalance_every: int = 200
    join_window: float = 0.0
    static_experts: bool = False
    ep_size: int = 0
    on_failure: str = RECONFIGURE
    emulate_compute: float = 0.0
    job_dir: Path | None = None
    registry: Path | None = None
    environment: dict[str, str] = field(default_factory=dict[str, str])
    preload: tuple[str, ...] = PRELOAD
    zygote: str = ""
    log_folder: Path | None = None

    @property
    def job_name(self) -> str:
        """The job's name: as given, else the script's."""
        name = re.sub(r"[^A-Za-z0-9._-]", "-", self.script.stem).lstrip(".-_")[:64]
        return self.job or name or "job"

    @property
    def start_names(self) -> tuple[str, ...]:
        """The names of the nodes that the job starts with."""
        return self.node_names or tuple(f"node-{number}" for number in range(self.nodes))

    def check(self) -> None:
        """Refuse what cannot work, before anything is touched.

        Raises:
            BadInputError: with what is wrong, and what to do.
        """
        if not self.script.is_file():
            raise BadInputError(f"there is no script {self.script}: give the path of a Python file")
        if not os.access(self.script, os.R_OK):
            raise BadInputError(f"the script {self.script} cannot be read: check its permissions")
        for option, value in (("--nodes", self.nodes), ("--workers-per-node", self.workers_per_node)):
            if not 1 <= value <= _MAX_NODES:
                raise BadInputError(f"{option} is {value}: it must lie between 1 and {_MAX_NODES}")
        if self.checkpoint_every < 1:
            raise BadInputError(f"--checkpoint-every is {self.checkpoint_every}: it must be at least 1 step")
        check_expert_options(self.slots, self.fault_threshold, self.join_window, self.strategy, self.rebalance_every)
        self._check_baseline()
        check_name("the job's name", self.job_name)
        if not 0 <= self.port <= 65535:
            raise BadInputError(f"--port is {self.port}: it must lie between 0 (a free one) and 65535")
        if self.zygote and not Path(self.zygote).is_socket():
            raise BadInputError(f"--zygote is {self.zygote}: no zygote listens there; leave it out to have one started")
        if self.store:
            check_store(self.store)
        if self.events is not None:
            check_writable_file("--events", self.events)
        for option, folder in (("--checkpoint", self.checkpoint_dir), ("--job-dir", self.job_dir)):
            if folder is not None:
                check_creatable_folder(option, folder)

    def _check_baseline(self) -> None:
        if self.ep_size < 0 or (self.ep_size and not self.static_experts):
            raise BadInputError(f"--ep-size is {self.ep_size}: give a number of nodes, together with --static-experts")
        if self.static_experts and self.workers_per_node > 1:
            raise BadInputError(
                f"--static-experts with {self.workers_per_node} workers per node: give --workers-per-node 1"
            )
        if self.on_failure not in (RECONFIGURE, RESTART):
            raise BadInputError(f"--on-failure is {self.on_failure!r}: give {RECONFIGURE} or {RESTART}")
        if self.on_failure == RESTART and self.checkpoint_dir is None:
            raise BadInputError("--on-failure restart begins from checkpoints: give --checkpoint DIR")
        if not 0 <= self.emulate_compute < float("inf"):
            raise BadInputError(
                f"--emulate-compute is {self.emulate_compute}: it must be 0 (none) or more seconds per token"
            )


def check_expert_options(
    slots: int = 1,
    fault_threshold: int = 1,
    join_window: float = 0.0,
    strategy: str = "best",
    rebalance_every: int = 0,
) -> None:
    """Refuse numbers that make no sense, and names of no strategy.

    Raises:
        BadInputError: with the option and its value.
    """
    if not 1 <= slots <= _MAX_SLOTS:
        raise BadInputError(f"--slots is {slots}: it must lie between 1 and {_MAX_SLOTS}")
    if fault_threshold < 1:
        raise BadInputError(f"--fault-threshold is {fault_threshold}: it must be at least 1 (one node for each expert)")
    if not 0 <= join_window < float("inf"):
        raise BadInputError(f"--join-window is {join_window}: it must be a number of seconds, 0 or more")
    if rebalance_every < 0:
        raise BadInputError(f"--rebalance-every is {rebalance_every}: give a number of steps, or 0 for never")
    if strategy not in STRATEGIES:
        raise BadInputError(f"--strategy is {strategy!r}: choose one of {', '.join(STRATEGIES)}")


def check_writable_file(option: str, path: Path) -> None:
    """Refuse a file that could not be written.

    Raises:
        BadInputError: it is a folder, or may not be written, or its folder is not there.
    """
    if path.is_dir():
        raise BadInputError(f"{option} {path} is a folder: give a file")
    if not path.parent.is_dir():
        raise BadInputError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInputError(f"{option} {path} cannot be written: check its permissions")


def check_creatable_folder(option: str, path: Path) -> None:
    """Refuse a folder that could not be made or written in.

    Raises:
        BadInputError: something that is no folder stands in the way, or the permissions do.
    """
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise BadInputError(f"{option} {path}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise BadInputError(f"{option} {path} cannot be written: check the permissions of {existing}")


def script_digest(script: Path, args: tuple[str, ...]) -> str:
    """Return what tells two nodes apart that were started with different code or arguments."""
    digest = hashlib.sha256(script.read_bytes())
    for arg in args:
        digest.update(b"\0" + os.fsencode(arg))
    return digest.hexdigest()
