"""What a job on this machine is started with, and what of it is refused before anything is touched."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.control.agent.zygote import PRELOAD
from holdfast.control.registry import check_name
from holdfast.control.store.choose import check_store
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import RESTART_ALL, JobSpec

_MOST_HERE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """Settings of `holdfast run`.

    spec: the job, as the user described it. node_names: of those that it starts with, () for node-0, node-1, ...
    store: "" for SQLite in the job's folder. registry: where commands find the job; None for nowhere. job_dir: where
    the job's files stay; None for a temporary folder. environment: of all processes. log_folder: for the workers'
    output, None to let it through. log: how much the job's processes log. zygote: the socket of one that runs already,
    and outlives the job.
    """

    spec: JobSpec
    node_names: tuple[str, ...] = ()
    store: str = ""
    port: int = 0
    job_dir: Path | None = None
    registry: Path | None = None
    environment: dict[str, str] = field(default_factory=dict[str, str])
    preload: tuple[str, ...] = PRELOAD
    zygote: str = ""
    log_folder: Path | None = None
    log: str = "warning"

    @property
    def start_names(self) -> tuple[str, ...]:
        """The names of the nodes that the job starts with."""
        return self.node_names or tuple(f"node-{number}" for number in range(self.spec.max_nodes))

    def check(self) -> None:
        """Refuse what cannot work, before anything is touched.

        Raises:
            BadInputError: with what is wrong, and what to do.
        """
        spec = self.spec
        check_script(spec.script)
        if spec.max_nodes > _MOST_HERE:
            raise BadInputError(f"--nodes is {spec.max_nodes}: it must lie between 1 and {_MOST_HERE} on one machine")
        if spec.min_nodes > spec.max_nodes:
            raise BadInputError(f"--nodes is {spec.min_nodes}:{spec.max_nodes}: the first number must not be above")
        _check_baseline(spec)
        check_name("the job's name", spec.settled("/").name)
        if not 0 <= self.port <= 65535:
            raise BadInputError(f"--port is {self.port}: it must lie between 0 (a free one) and 65535")
        if self.zygote and not Path(self.zygote).is_socket():
            raise BadInputError(f"--zygote is {self.zygote}: no zygote listens there; leave it out to have one started")
        if self.store:
            check_store(self.store)
        check_places(spec)
        if self.job_dir is not None:
            check_creatable_folder("--job-dir", self.job_dir)


def check_script(script: str) -> None:
    """Refuse a script that cannot be run.

    Raises:
        BadInputError: there is none, or it cannot be read.
    """
    if not os.path.isfile(script):
        raise BadInputError(f"there is no script {script}: give the path of a Python file")
    if not os.access(script, os.R_OK):
        raise BadInputError(f"the script {script} cannot be read: check its permissions")


def _check_baseline(spec: JobSpec) -> None:
    experiments = spec.experiments
    if experiments.ep_size and not experiments.static_experts:
        raise BadInputError(
            f"--ep-size is {experiments.ep_size}: give a number of nodes, together with --static-experts"
        )
    if experiments.static_experts and spec.workers_per_node > 1:
        raise BadInputError(
            f"--static-experts with {spec.workers_per_node} workers per node: give --workers-per-node 1"
        )
    if spec.recovery.restarts_all and not spec.checkpoint.dir:
        raise BadInputError(f"--on-node-failure {RESTART_ALL} begins from checkpoints: give --checkpoint-dir DIR")


def check_places(spec: JobSpec) -> None:
    """Refuse places that could not be written.

    Raises:
        BadInputError: naming the option and the place.
    """
    if spec.output.events:
        check_writable_file("--events", Path(spec.output.events))
    if spec.checkpoint.dir:
        check_creatable_folder("--checkpoint-dir", Path(spec.checkpoint.dir))


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


def script_digest(script: str, args: tuple[str, ...]) -> str:
    """Return what tells two nodes apart that were started with different code or arguments."""
    digest = hashlib.sha256(Path(script).read_bytes())
    for arg in args:
        digest.update(b"\0" + os.fsencode(arg))
    return digest.hexdigest()
