"""Runs a job on this machine and follows its events, for the demo, benchmarks and chaos tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import msgspec

from holdfast.control.client import CoordinatorClient
from holdfast.control.registry import find_job, registry_directory
from holdfast.errors import HoldfastError
from holdfast.observability.event_lines import decode_event
from holdfast.protocol.events import (
    CoordinatorRestarted,
    Event,
    GenerationStarted,
    JobStarted,
    NodesJoined,
    ReadEvent,
    WorkersChanged,
)

E = TypeVar("E", bound=Event)


class JobTimeoutError(HoldfastError):
    """An awaited event did not come; the message ends with the job's last events and output."""


class EventLog:
    """Follows a job's event file in a thread.

    Args:
        path: the file; it need not exist yet.
        alive: returns whether more events may come.
    """

    def __init__(self, path: Path, alive: Callable[[], bool]) -> None:
        self.events_file = path
        self.events: list[ReadEvent] = []
        self._alive = alive
        self._followed = True
        self._drained = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read_events, name="events", daemon=True)

    def follow(self) -> None:
        """Start to read."""
        self._reader.start()

    def unfollow(self) -> None:
        """Read the remaining events, and end the thread."""
        self._followed = False
        self._reader.join()

    # ---- watching ----

    def wait(
        self,
        kind: type[E],
        where: Callable[[E], bool] = lambda _: True,
        /,
        *,
        since: int = 0,
        timeout: float = 120.0,
        **fields: Any,
    ) -> E:
        """Return the first event of a kind, from index `since` on, that satisfies `where` and has these field values.

        Raises:
            JobTimeoutError: it did not come in time, or the job ended before.
        """
        deadline = time.monotonic() + timeout
        place = since
        with self._changed:
            while True:
                while place < len(self.events):
                    event = self.events[place]
                    if isinstance(event, kind) and _has(event, fields) and where(event):
                        return event
                    place += 1
                left = deadline - time.monotonic()
                if left <= 0 or self._drained:
                    when = "before the job ended" if self._drained else f"within {timeout} s"
                    raise JobTimeoutError(f"no {kind.__name__} {fields or ''} {when}:\n{self.story()}")
                self._changed.wait(min(left, 0.25))

    def all(self, kind: type[E]) -> list[E]:
        """Return all events of this kind so far."""
        with self._changed:
            return [event for event in self.events if isinstance(event, kind)]

    def story(self) -> str:
        """Return the last events, for error messages."""
        return "\n".join(msgspec.json.encode(event).decode() for event in self.events[-12:])

    # ---- nodes and processes ----

    def pids(self, node: str) -> tuple[int, tuple[int, ...]]:
        """Return the process ids of a node's agent and of its newest workers."""
        agent, workers = 0, ()
        for event in list(self.events):
            for joined in event.nodes if isinstance(event, NodesJoined) else ():
                if joined.node == node:
                    agent, workers = joined.agent_pid, joined.worker_pids
            if isinstance(event, WorkersChanged) and event.node == node:
                workers = event.worker_pids
        return agent, workers

    def nodes(self) -> tuple[str, ...]:
        """Return the members of the newest generation."""
        generations = self.all(GenerationStarted)
        return generations[-1].members if generations else ()

    # ---- faults ----

    def signal_node(self, node: str, how: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to the agent and the workers of a node; return the unix time of the first one."""
        agent, workers = self.pids(node)
        at = time.time()
        for pid in (*workers, agent):
            with contextlib.suppress(ProcessLookupError):  # the agent ends the other workers once one has died
                os.kill(pid, how)
        return at

    # ---- inside ----

    def _read_events(self) -> None:
        """Follow the file until the job has ended and nothing new comes; complete lines end with a newline."""
        buffer = b""
        handle = None
        while True:
            last = not (self._followed and self._alive())
            if handle is None and self.events_file.exists():
                handle = self.events_file.open("rb")
            data = handle.read() if handle else b""
            *lines, buffer = (buffer + data).split(b"\n")
            if lines:
                with self._changed:
                    self.events += map(decode_event, lines)
                    self._changed.notify_all()
            elif last:
                break
            else:
                time.sleep(0.01)
        if handle:
            handle.close()
        with self._changed:
            self._drained = True
            self._changed.notify_all()


class LocalJob(EventLog):
    """`holdfast run` as a child process; a context manager that leaves no process behind.

    Args:
        script: the training script.
        args: its arguments.
        options: further options of the command.
        folder: for events, output and the store; a temporary one by default.
    """

    def __init__(
        self,
        script: str | Path,
        args: Sequence[str] = (),
        *,
        options: Sequence[str] = (),
        folder: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._temporary = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="holdfast-")
            folder = Path(self._temporary.name)
        self.folder = folder
        super().__init__(self.folder / "events.jsonl", alive=self._runs)
        self.output_file = self.folder / "output.txt"
        launch = [sys.executable, "-m", "holdfast", "run", "--events", str(self.events_file), *options]
        self.command = [*launch, str(script), *args]
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.output_file.open("ab") as output:
            self.process = self.started(output)
        self.follow()
        return self

    def started(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start the command with its output in this file."""
        return subprocess.Popen(
            self.command, stdout=output, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
        )

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.unfollow()
        if self._temporary is not None:
            self._temporary.cleanup()

    def wait_exit(self, timeout: float = 120.0) -> int:
        """Return the job's exit code once it has ended and all its events are read."""
        assert self.process is not None
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise JobTimeoutError(f"the job did not end within {timeout} s:\n{self.story()}") from None
        self.unfollow()
        return code

    def output(self) -> str:
        """Return the output of the job so far."""
        return self.output_file.read_text(errors="replace")

    def wait_output(self, text: str, times: int = 1, timeout: float = 60.0) -> None:
        """Wait until the job has printed `text` a number of times.

        Raises:
            JobTimeoutError: the time is over, or the job has ended.
        """
        limit = time.monotonic() + timeout
        while self.output().count(text) < times:
            if not self._runs() or time.monotonic() > limit:
                raise JobTimeoutError(f"the job has not printed {text!r} {times} times:\n{self.story()}")
            time.sleep(0.01)

    def story(self) -> str:
        """Return the last events and the end of the output, for error messages."""
        return f"{super().story()}\n--- output ---\n{self.output()[-6000:]}"

    def call(self, *arguments: str) -> str:
        """Run another holdfast command against this job; return its output.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        command = [sys.executable, "-m", "holdfast", *arguments, "--address", self.url]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    def client(self) -> CoordinatorClient:
        """Return a client of this job's coordinator, as a context manager; it needs no process."""
        return CoordinatorClient(find_job(registry_directory(self.environment), self.url))

    def inject(
        self,
        fault: str,
        node: str,
        *,
        worker: int | None = None,
        step: int | None = None,
        phase: str = "",
        times: float = 3.0,
        by_s: float = 3600.0,
    ) -> None:
        """Inject a fault, within milliseconds."""
        with self.client() as client:
            client.inject(fault, node, worker=worker, step=step, phase=phase, times=times, by_s=by_s)

    def add_nodes(self, count: int) -> None:
        """Request more nodes, within milliseconds."""
        with self.client() as client:
            client.add_nodes(count)

    @property
    def url(self) -> str:
        """The address of the newest coordinator of the job."""
        started = self.wait(JobStarted)
        restarts = self.all(CoordinatorRestarted)
        return restarts[-1].url if restarts else started.url

    def _runs(self) -> bool:
        return self.process is not None and self.process.poll() is None


def _has(event: Event, fields: dict[str, Any]) -> bool:
    return all(getattr(event, name) == value for name, value in fields.items())
