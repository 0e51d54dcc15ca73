"""A pool of real processes on this machine, used as by its user, for tests and benchmarks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.control.pool_client import PoolClient
from holdfast.control.registry import find_pool, registry_directory
from holdfast.errors import EXIT_REFUSED
from holdfast.observability.event_lines import read_events
from holdfast.observability.history.audit import audit_events
from holdfast.protocol.events import RolledBack, StepCommitted

#: Time limit in seconds of all waits; generous, because machines may be loaded.
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Command:
    """The words after `holdfast`, with the environment and the folder of the command."""

    words: Sequence[str]
    environment: Mapping[str, str]
    folder: Path


@dataclass(frozen=True, slots=True)
class Ran:
    """The exit code and the output of a command."""

    code: int
    printed: str


def run_in_a_process(command: Command) -> Ran:
    """Run a command in its own process, as its user does."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *command.words],
        env=command.environment,
        cwd=command.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return Ran(done.returncode, done.stdout + done.stderr)


class LocalPool:
    """`holdfast pool --local N`, and the commands of its user.

    Its methods assert requirements: they are for tests and benchmarks, which end if one is violated.
    """

    def __init__(
        self, folder: Path, nodes: int, *options: str, store: str = "", run: Callable[[Command], Ran] | None = None
    ) -> None:
        """Start the pool.

        Args:
            folder: a private one (mode 700), for all files of the pool.
            nodes: number of local nodes.
            options: of the pool.
            store: the address of the store, if it is not in the folder.
            run: runs a command of the user; None starts a process for each.
        """
        self.folder = folder
        self.nodes = nodes
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        self.log = folder / "pool.log"
        self._run = run or run_in_a_process
        self._agents: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, "-m", "holdfast", "pool", "--local", str(nodes), "--journals", str(self.journals)]
        command += ["--store", store or f"sqlite:{folder}/p.db", *options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
        self.wait(lambda: len(self.events("node_added")) == nodes, "its nodes")

    # ---- user actions ----

    def call(self, *args: str, code: int = 0) -> str:
        """Run a command; return its output."""
        done = self._run(Command(args, self.environment, self.folder))
        assert done.code == code, f"{args}: {done.code}\n{done.printed}"
        return done.printed

    def add_node(self, name: str, *options: str) -> None:
        """Start another node with `holdfast agent`."""
        command = [sys.executable, "-m", "holdfast", "agent", "--node-name", name, *options]
        with self.log.open("ab") as log:
            agent = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
        self._agents.append(agent)

    def until_answered(self) -> None:
        """Wait until a server answers its users."""

        def answered() -> bool:
            command = [sys.executable, "-m", "holdfast", "jobs"]
            return subprocess.run(command, env=self.environment, capture_output=True, check=False).returncode == 0

        self.wait(answered, "a server that answers")

    def submit(self, name: str, nodes: str, script: Path, *args: str, options: Sequence[str] = ()) -> None:
        """Submit a job. If the pool answers that its store is slow, wait until the job exists, as the pool promises."""
        words = ("submit", "--name", name, "--nodes", nodes, *options, str(script), *args)
        done = self._run(Command(words, self.environment, self.folder))
        if done.code == EXIT_REFUSED and "is done then" in done.printed:
            self.wait(lambda: name in self._names(), f"job {name}, once the store answers")
            return
        assert done.code == 0, f"{words}: {done.code}\n{done.printed}"

    def _names(self) -> set[str]:
        entry = find_pool(registry_directory(self.environment), None, None)
        assert entry is not None
        with PoolClient(entry) as client:
            return {job["job"] for job in client.status()["jobs"]}

    def job(self, name: str) -> Mapping[str, Any]:
        """Return a job's state as shown by `holdfast jobs`, without starting a process."""
        entry = find_pool(registry_directory(self.environment), None, None)
        assert entry is not None
        with PoolClient(entry) as client:
            return next(job for job in client.status()["jobs"] if job["job"] == name)

    # ---- journals ----

    @property
    def journals(self) -> Path:
        """The folder of the event files."""
        return self.folder / "journals"

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the pool's events, of these kinds only."""
        path = self.journals / "pool.events.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if not kinds or event["event"] in kinds]

    def steps(self, name: str) -> list[int]:
        """Return the steps that a job has committed."""
        return [event["step"] for event in self.events_of(name, "step_committed")]

    def events_of(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        """Return a job's events, of these kinds only."""
        (path,) = self.journals.glob(f"{name}.*.events.jsonl")
        lines = path.read_bytes().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if not kinds or event["event"] in kinds]

    def check_journal_of(self, name: str) -> None:
        """Check that every step is committed once, with all samples, and that none was ever undone."""
        (path,) = self.journals.glob(f"{name}.*.events.jsonl")
        events = read_events(path)
        audited = audit_events(events)
        assert audited.sound, audited.findings
        assert audited.unproven == 0, f"{audited.unproven} steps are not proven"
        steps = list[int]()
        for event in events:
            if isinstance(event, StepCommitted):
                steps.append(event.step)
            elif isinstance(event, RolledBack):  # a resumed job starts with a roll-back to its saved step
                assert event.to_step == steps[-1], f"steps {event.to_step + 1} to {steps[-1]} were undone: {event.why}"
        gaps = [step for step, expected in zip(steps, range(1, len(steps) + 1), strict=True) if step != expected]
        assert not gaps, f"steps are missing, or there twice, from {gaps[0]} on"

    def check_owners(self) -> None:
        """Check that no node was granted before its previous owner released it."""
        owner: dict[str, int] = {}
        for event in self.events("node_granted", "node_released"):
            if event["event"] == "node_granted":
                assert event["node"] not in owner
                assert event["grant"] > max(owner.values(), default=0)
                owner[event["node"]] = event["grant"]
            else:
                assert owner.pop(event["node"]) == event["grant"]

    # ---- processes ----

    def pid_of(self, part: str) -> int:
        """Return the process ID of the server or of a node."""
        found = [pid for pid, line in self.processes() if f"local_pool {part}" in line]
        assert len(found) == 1, found
        return found[0]

    def processes(self) -> list[tuple[int, str]]:
        """Return all processes that this pool started: they have its environment."""
        mark, found = f"XDG_RUNTIME_DIR={self.folder}".encode(), list[tuple[int, str]]()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
            except (OSError, UnicodeDecodeError):
                continue
        return found

    def wait(self, what: Callable[[], object], of: str) -> None:
        """Wait until a condition holds; `of` describes it for the error message."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, f"{of} did not come\n{self.log.read_text()}\n{self.events()[-12:]}"
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def goes_on(self, *names: str, steps: int = 3) -> None:
        """Wait until each of these jobs has committed more steps."""
        for name in names:
            self.wait(lambda name=name: list(self.journals.glob(f"{name}.*.events.jsonl")), f"the journal of {name}")
            before = len(self.steps(name))
            self.wait(lambda name=name, before=before: len(self.steps(name)) >= before + steps, f"steps of {name}")

    def has(self, name: str, nodes: int) -> Callable[[], bool]:
        """Return a predicate that is true if a job has this many nodes."""
        return lambda: len(self.job(name)["nodes"]) == nodes

    def end(self) -> None:
        """End the pool as a user does, and check that no process is left."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(timeout=PATIENCE_S) == 130
        for agent in self._agents:
            agent.send_signal(signal.SIGINT)
            assert agent.wait(timeout=PATIENCE_S) == 130
        assert not self.processes()
