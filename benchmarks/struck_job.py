"""A job of four nodes for repeated faults, with checks of its state and resources afterwards."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

from left_behind import (
    MARK,
    ProcessResources,
    RoleResources,
    find_growth,
    list_shared_memory,
    read_resources,
    summarize_by_role,
)

from holdfast.errors import UnreachableError
from holdfast.protocol.events import (
    CoordinatorRestarted,
    Event,
    GenerationStarted,
    JobStarted,
    NodesJoined,
    StepCommitted,
)
from tests.harness.local_job import LocalJob

E = TypeVar("E", bound=Event)
T = TypeVar("T")

NODES = 4
SCRIPT = Path(__file__).resolve().with_name("exact_training.py")
STEP_S = 0.12
CHECKPOINT_EVERY, SNAPSHOT_EVERY = 20, 5
#: Steps with all nodes after which a job has recovered from a fault.
SETTLE_STEPS = 3
#: Seconds after which a recovery counts as failed.
LONGEST_S = 90.0
#: Seconds in which abandoned resources must be released: collectives time out after two minutes.
LET_GO_S = 150.0


class ChaosJob:
    """A job that is started again with the same command after it has ended; a context manager.

    Args:
        folder: for all files of the job.
        data: arguments of the script that concern its data.
        options: further options of `holdfast run`.
    """

    def __init__(self, folder: Path, data: Sequence[str], options: Sequence[str] = ()) -> None:
        self.folder = folder
        self.hashes = folder / "hashes"
        #: Byte ranges of the hash file in which a worker's state was corrupted on purpose.
        self.corrupt: list[tuple[int, int]] = []
        self.checkpoints, self.memory = folder / "checkpoints", folder / "memory"
        self._mark = secrets.token_hex(8)
        self._data = tuple(data)
        self._options = tuple(options)
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._shared = list_shared_memory()
        self._at_begin: dict[str, RoleResources] = {}
        self.job = self._make_job()

    def __enter__(self) -> Self:
        self.job.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.job.__exit__(*exc)

    def _make_job(self) -> LocalJob:
        options = ["--nodes", str(NODES), "--allow-faults", "--max-restarts", "1000", "--verify-state", "1"]
        options += ["--checkpoint-dir", str(self.checkpoints), "--checkpoint-every", str(CHECKPOINT_EVERY)]
        options += ["--snapshot-every", str(SNAPSHOT_EVERY), "--snapshot-dir", str(self.memory)]
        options += ["--job-dir", str(self.folder / "job"), *self._options]
        args = ["--steps", "1000000", "--step-seconds", str(STEP_S * NODES), "--hashes", str(self.hashes)]
        args += ["--best", "1", *self._data]
        environment = {MARK: self._mark, "TMPDIR": str(self._temporary)}
        return LocalJob(SCRIPT, args, options=options, folder=self.folder, environment=environment)

    def restart(self) -> None:
        """Start the ended job again with the same command."""
        self.job.__exit__(None, None, None)
        since = len(self.job.events)
        self.job = self._make_job()
        self.job.__enter__()
        self.wait(CoordinatorRestarted, since=since)

    # ---- watching ----

    @property
    def event_count(self) -> int:
        """The number of events so far."""
        return len(self.job.events)

    def wait(self, kind: type[E], where: Callable[[E], bool] = lambda _: True, /, *, since: int) -> E:
        """Return the first such event from an index of the journal on; raise JobTimeoutError after 90 s."""
        return self.job.wait(kind, where, since=since, timeout=LONGEST_S)

    def events_since(self, kind: type[E], place: int) -> list[E]:
        """Return the events of a kind from an index on."""
        return [event for event in list(self.job.events[place:]) if isinstance(event, kind)]

    def nodes(self) -> tuple[str, ...]:
        """Return the members of the newest generation, by rank."""
        return self.job.nodes()

    def worker_pid(self, node: str) -> int:
        """Return the process ID of a node's worker."""
        return self.job.pids(node)[1][0]

    def coordinator_pid(self) -> int:
        """Return the process ID of the coordinator."""
        began = [e for e in list(self.job.events) if isinstance(e, JobStarted | CoordinatorRestarted)]
        return began[-1].coordinator_pid

    def last_step(self) -> int:
        """Return the newest committed step."""
        steps = self.job.all(StepCommitted)
        return steps[-1].step if steps else 0

    def wait_recovered(self, since: int, steps: int = SETTLE_STEPS) -> StepCommitted:
        """Wait until all nodes have committed this many steps together, and return the first of these steps.

        Raises:
            JobTimeoutError: they have not, within 90 s.
        """

        def of_all() -> list[StepCommitted]:
            newest = self.job.all(GenerationStarted)[-1]
            whole = newest.world_size == NODES
            return [e for e in self.events_since(StepCommitted, since) if whole and e.generation == newest.generation]

        self.wait(StepCommitted, lambda _: len(of_all()) >= steps, since=max(since, 0))
        return of_all()[0]

    # ---- acting ----

    def request(self, act: Callable[[LocalJob], T]) -> T:
        """Send a request to the coordinator, and repeat it while a coordinator is starting."""
        until = time.monotonic() + LONGEST_S
        while True:
            try:
                return act(self.job)
            except UnreachableError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def add_nodes(self, count: int) -> None:
        """Start more nodes."""
        if count:
            self.request(lambda job: job.add_nodes(count))

    def save(self) -> None:
        """Request a checkpoint of the next step."""

        def asked(job: LocalJob) -> None:
            with job.client() as client:
                client.checkpoint()

        self.request(asked)

    def kill_node(self, node: str) -> float:
        """Kill a node's agent and workers; return when. The agent dies first, so that it cannot report the workers."""
        agent, workers = self.job.pids(node)
        at = time.time()
        for pid in (agent, *workers):
            send_signal(pid)
        return at

    def joined_node(self, since: int) -> str:
        """Return the first node that has joined since an index."""
        return self.wait(NodesJoined, since=since).names[0]

    # ---- remaining resources ----

    def record_baseline(self) -> None:
        """Record the resources of the job's processes, as the limit for the end."""
        self._at_begin = summarize_by_role(self.read_resources())

    def read_resources(self) -> list[ProcessResources]:
        """Return the resources of the job's processes."""
        return read_resources(self._mark)

    def find_leaks(self) -> list[str]:
        """Return resources that grew since the start, after waiting for their release."""
        until = time.monotonic() + LET_GO_S
        while wrong := find_growth(self._at_begin, summarize_by_role(self.read_resources())):
            if time.monotonic() > until:
                break
            time.sleep(1.0)
        print(f"{'role':12s} processes  threads  descriptors  MiB   (largest of one process: start -> end)")
        for role, after in summarize_by_role(self.read_resources()).items():
            before = self._at_begin.get(role, after)
            pairs = [(before.processes, after.processes), (before.threads, after.threads)]
            pairs += [(before.descriptors, after.descriptors), (before.resident_kib >> 10, after.resident_kib >> 10)]
            print(f"{role:12s} " + "  ".join(f"{first} -> {second}" for first, second in pairs))
        return wrong

    def stop(self) -> list[str]:
        """End the job with Ctrl-C; return resources that remain, and missing saves."""
        assert self.job.process is not None
        self.job.process.send_signal(signal.SIGINT)
        code = self.job.wait_exit(LONGEST_S)
        wrong = [f"it ended with exit code {code}"] if code != 130 else []
        wrong += [f"process {one.pid} ({one.role}) still runs" for one in self.read_resources()]
        wrong += [f"{name} is left in shared memory" for name in sorted(list_shared_memory() - self._shared)]
        wrong += [f"{path.name} is left in the folder of snapshots" for path in self.memory.iterdir()]
        left = [name for name in sorted(os.listdir(self._temporary)) if name.startswith("holdfast")]
        wrong += [f"{name} is left in the temporary folder" for name in left]
        if f"step {self.last_step()} is saved" not in self.job.output():
            wrong.append(f"step {self.last_step()} is not saved at its end")
        return wrong

    def find_differences(self) -> list[str]:
        """Return the workers and steps with a state that differs from an undisturbed run."""
        undisturbed = self.folder / "undisturbed"
        command = [
            sys.executable,
            str(SCRIPT),
            *self._data,
            "--steps",
            str(self.last_step()),
            "--hashes",
            str(undisturbed),
        ]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        right = {step: digest for _, step, digest in _lines(undisturbed.read_bytes())}
        known, at, wrong = self.hashes.read_bytes(), 0, list[str]()
        for begin, end in [*self.corrupt, (len(known), len(known))]:
            found = _lines(known[at:begin])
            wrong += [
                f"step {step} of process {pid}" for pid, step, digest in found if right.get(step, digest) != digest
            ]
            at = end
        return wrong


def send_signal(pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)


def _lines(data: bytes) -> list[tuple[int, int, str]]:
    """Return (pid, step, hash) of each complete line."""
    rows = [line.split() for line in data.decode().split("\n")[:-1]]
    return [(int(pid), int(step), digest) for pid, step, digest in rows]
