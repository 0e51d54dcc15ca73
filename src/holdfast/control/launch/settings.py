"""The settings of a job on this machine, and their checks before anything is changed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
import zipfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from holdfast.control.coordinator.alerts import check_alert
from holdfast.control.failure_classes import read_rules
from holdfast.control.link.forking import PRELOAD
from holdfast.control.programs import check_program
from holdfast.control.store.store_choice import check_store
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import RESTART_ALL, JobSpec
from holdfast.storage import is_url, storage_at

#: most nodes of a job on one machine
_MOST_HERE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """Settings of `holdfast run`."""

    #: the job, as the user described it
    spec: JobSpec
    #: names of its keys in messages, by key, if they differ from the options
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    #: names of its first nodes; () for node-0, node-1, ...
    node_names: tuple[str, ...] = ()
    #: "" for SQLite in the job's folder
    store: str = ""
    port: int = 0
    #: folder for the job's files; None for a temporary folder
    job_dir: Path | None = None
    #: folder in which commands find the job; None for none
    registry: Path | None = None
    #: environment of all processes
    environment: dict[str, str] = field(default_factory=dict[str, str])
    preload: tuple[str, ...] = PRELOAD
    #: socket of a running zygote that outlives the job
    zygote: str = ""
    #: Folder for the workers' output, if `spec` names none and the output is not printed. None: print the output.
    log_folder: Path | None = None
    #: log level of the job's processes
    log: str = "warning"

    @property
    def start_names(self) -> tuple[str, ...]:
        """The names of the nodes that the job starts with."""
        return self.node_names or tuple(f"node-{number}" for number in range(self.spec.max_nodes))

    @property
    def standby_names(self) -> tuple[str, ...]:
        """The names of the standbys that come with them."""
        return tuple(f"standby-{number}" for number in range(self.spec.recovery.standbys))

    def check(self) -> None:
        """Check the script, the numbers of nodes, the port, the zygote, the store, and all paths and programs.

        Nothing is changed.

        Raises:
            BadInputError: with the fault and a remedy.
        """
        spec, names = self.spec, self.names
        check_script(spec.script)
        _check_nodes(spec, names)
        _check_baseline(spec, names)
        if not 0 <= self.port <= 65535:
            raise BadInputError(f"--port is {self.port}: it must lie between 0 (a free one) and 65535")
        if self.zygote and not Path(self.zygote).is_socket():
            raise BadInputError(f"--zygote is {self.zygote}: no zygote listens there; leave it out to have one started")
        if self.store:
            check_store(self.store)
        check_places(spec, names)
        if spec.recovery.preflight:
            check_program(names.get("recovery.preflight", "--preflight"), spec.recovery.preflight)
        read_rules(spec.recovery.failure_classes)
        if self.job_dir is not None:
            check_creatable_folder("--job-dir", self.job_dir)


def check_script(script: str) -> None:
    """Check that a script can be run. Source code is compiled; bytecode and zip archives are not looked into.

    Raises:
        BadInputError: it does not exist, it cannot be read, or it is not valid Python.
    """
    if not os.path.isfile(script):
        raise BadInputError(f"there is no script {script}: give the path of a Python file")
    if not os.access(script, os.R_OK):
        raise BadInputError(f"the script {script} cannot be read: check its permissions")
    content = Path(script).read_bytes()
    if content.startswith(MAGIC_NUMBER) or zipfile.is_zipfile(script):  # Python also runs bytecode and archives.
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The workers print them when they compile the script.
            compile(content, script, "exec")
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise BadInputError(f"the script {script}{line} is not valid Python: {why}") from None


def _check_nodes(spec: JobSpec, names: Mapping[str, str]) -> None:
    """Refuse more than `_MOST_HERE` nodes and standbys, or more nodes at least than at most.

    Args:
        spec: the job.
        names: names of its keys in messages, by key; the names of the options for others.

    Raises:
        BadInputError: with the option and its value.
    """
    standbys = spec.recovery.standbys
    if spec.max_nodes + standbys > _MOST_HERE >= spec.max_nodes:
        option = names.get("recovery.standbys", "--standbys")
        raise BadInputError(
            f"{option} is {standbys}: with the job's nodes there are at most {_MOST_HERE} on one machine"
        )
    least, most = (names.get(key, "--nodes") for key in ("min_nodes", "max_nodes"))
    if spec.max_nodes > _MOST_HERE:
        raise BadInputError(f"{most} is {spec.max_nodes}: it must lie between 1 and {_MOST_HERE} on one machine")
    if spec.min_nodes > spec.max_nodes and least == most:
        raise BadInputError(
            f"{most} is {spec.min_nodes}:{spec.max_nodes}: the first number must not be above the second"
        )
    if spec.min_nodes > spec.max_nodes:
        raise BadInputError(f"{least} is {spec.min_nodes}: it must not be above {most}, {spec.max_nodes}")


def _check_baseline(spec: JobSpec, names: Mapping[str, str]) -> None:
    """Check the settings for static experts and full restarts.

    Refused are an expert parallel size without static experts, static experts with several workers on a node, and full
    restarts without a checkpoint directory.

    Args:
        spec: the job.
        names: names of its keys in messages, by key; the names of the options for others.

    Raises:
        BadInputError: with the option, its value and a remedy.
    """
    experiments = spec.experiments
    if experiments.ep_size and not experiments.static_experts:
        option = names.get("experiments.ep_size", "--ep-size")
        raise BadInputError(f"{option} is {experiments.ep_size}: it counts with static experts; give --static-experts")
    if experiments.static_experts and spec.workers_per_node > 1:
        option = names.get("workers_per_node", "--workers-per-node")
        raise BadInputError(f"{option} is {spec.workers_per_node}: with static experts it must be 1")
    if spec.recovery.restarts_all and not spec.checkpoint.dir:
        option = names.get("recovery.on_node_failure", "--on-node-failure")
        raise BadInputError(f"{option} is {RESTART_ALL}, which begins from checkpoints: give --checkpoint-dir DIR")


def check_places(spec: JobSpec, names: Mapping[str, str] | None = None) -> None:
    """Refuse an alert that cannot be sent, and files, folders or a checkpoint storage of a job that cannot be written.

    Args:
        spec: the job.
        names: names of its keys in messages, by key; the names of the options for others.

    Raises:
        BadInputError: naming the option or key, and the place.
    """
    names = names or {}
    check_alert(names.get("output.alert", "--alert"), spec.output.alert)
    if spec.output.events:
        check_writable_file(names.get("output.events", "--events"), Path(spec.output.events))
    for key, option, folder in (
        ("checkpoint.dir", "--checkpoint-dir", spec.checkpoint.dir),
        ("output.log_dir", "--log-dir", spec.output.log_dir),
    ):
        if is_url(folder) and key == "checkpoint.dir":
            _check_checkpoint_url(names.get(key, option), folder)
        elif folder:
            check_creatable_folder(names.get(key, option), Path(folder))


def _check_checkpoint_url(option: str, url: str) -> None:
    """Refuse a checkpoint URL in memory, which other workers cannot read, or whose storage cannot be used.

    Raises:
        BadInputError: with the option, its value and a remedy.
    """
    storage = storage_at(url)
    if url.lower().startswith("memory:"):
        raise BadInputError(
            f"{option} is {url}, which lies in one process's memory, where no other worker finds it: give a folder or "
            "a URL that all nodes see"
        )
    storage.check()


def check_writable_file(option: str, path: Path) -> None:
    """Check that a file exists and is writable, or can be created in its folder. `option` is its name in the message.

    Raises:
        BadInputError: it is not a regular file or not writable, or its folder does not exist.
    """
    with _convert_errors(option, path):
        if path.is_dir():
            raise BadInputError(f"{option} {path} is a folder: give a file")
        if path.exists() and not path.is_file():
            raise BadInputError(f"{option} {path} is a device or a pipe: give a file")
        if not path.parent.is_dir():
            raise BadInputError(f"{option} {path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise BadInputError(f"{option} {path} cannot be written: check its permissions")


def check_creatable_folder(option: str, path: Path) -> None:
    """Check that a folder is writable, or can be created with its parents. `option` is its name in the message.

    Raises:
        BadInputError: a file is in its place, or permissions are missing.
    """
    with _convert_errors(option, path):
        existing = path.absolute()
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            raise BadInputError(f"{option} {path}: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise BadInputError(f"{option} {path} cannot be written: check the permissions of {existing}")


@contextlib.contextmanager
def _convert_errors(option: str, path: Path) -> Generator[None]:
    """Raise `BadInputError` for a system call inside that refuses the path, for example because a name is too long."""
    try:
        yield
    except OSError as error:
        raise BadInputError(f"{option} {path} cannot be used: {error.strerror}") from None


def script_digest(script: str, args: tuple[str, ...]) -> str:
    """Return a SHA-256 digest of the script's content and the arguments.

    Nodes with different ones cannot be in one job.
    """
    digest = hashlib.sha256(Path(script).read_bytes())
    for arg in args:
        digest.update(b"\0" + os.fsencode(arg))
    return digest.hexdigest()
