"""Measure the cost and the latency of a job's control plane as the job grows.

    make bench-control-plane

A coordinator runs in its own process, as users run it. The nodes are fakes: real agents over real connections, with
workers that drive the real state machines but train nothing (`tests.simulation.fakes.fake_nodes`). They share this
machine with the coordinator, so its *processor time* is the figure that counts. Clock times include the processor time
of the fake nodes, which is printed next to them. Each line is one figure, each column one number of nodes. With
--repeats, each cell shows the median and the range.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from holdfast.observability.event_lines import decode_event
from holdfast.protocol.events import FailureDetected, GenerationStarted, ReadEvent, StepCommitted
from tests.simulation.fakes.fake_look import Look
from tests.simulation.fakes.fake_nodes import FakeJob, FakeNodes
from tests.simulation.fakes.fake_worker import Rendezvous

SIZES = (16, 64, 128, 256, 512, 1024)
WORKERS = 8
#: Micro-batches per worker and step. Each worker has computed one of them when a node is lost.
MICRO_BATCHES = 2
#: Largest number of nodes for which rendezvous keys are also posted as gloo does.
GLOO_UP_TO = 128
PATIENCE_S = 180.0
SAMPLE_S = 0.002
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: label, unit, divisor from raw values to the unit, and limits by number of nodes."""

    name: str
    unit: str
    scale: float = 1.0
    bars: Mapping[int, float] = field(default_factory=dict[int, float])

    def format(self, value: float) -> str:
        """Format a value in the unit of the figure."""
        return f"{value / self.scale:.3g}" if value / self.scale < 1000 else f"{value / self.scale:,.0f}"


FIGURES = {
    "start": Figure("all start together: first generation, clock", "s", bars={1024: 10.0}),
    "start_cpu": Figure("  coordinator's processor", "s"),
    "start_fakes": Figure("  fake nodes' processor", "s"),
    "idle": Figure("heartbeats only: share of a core", "%", 0.01, {1024: 0.10}),
    "step": Figure("a step adds, processor", "ms", 1e-3, {128: 5e-3, 1024: 20e-3}),
    "step_whole": Figure("  one step a second, heartbeats too", "ms", 1e-3),
    "told_cpu": Figure("node lost -> last Begin sent, processor", "s", bars={128: 0.15, 1024: 1.0}),
    "decided_cpu": Figure("  of which until the last report is received, processor", "s"),
    "told": Figure("  the same by the clock", "s"),
    "entered_cpu": Figure("node lost -> all entered (keys as NCCL's), processor", "s"),
    "entered": Figure("  the same by the clock", "s"),
    "entered_fakes": Figure("  fake nodes' processor", "s"),
    "gloo_cpu": Figure("node lost -> all entered (keys as gloo's), processor", "s"),
    "gloo": Figure("  the same by the clock", "s"),
    "down": Figure("a generation: messages to a node", ""),
    "down_kib": Figure("  their size", "KiB", 1024.0),
    "up": Figure("  messages from a node", ""),
    "up_kib": Figure("  their size", "KiB", 1024.0),
    "all_messages": Figure("  all messages together", ""),
    "outage": Figure("coordinator killed and restarted: all back, clock", "s", bars={1024: 10.0}),
    "outage_cpu": Figure("  its processor", "s"),
    "lost_steps": Figure("  steps that were lost or done again", "", bars=dict.fromkeys(SIZES, 0.0)),
    "memory": Figure("coordinator's memory, peak", "MiB", MIB, {1024: 300.0 * MIB}),
}
Samples = dict[str, list[float]]


class CoordinatorProcess:
    """A coordinator with its own port and store, which stay the same when it is killed and started again."""

    def __init__(self, folder: Path, job: FakeJob, nodes: int) -> None:
        port = job.url.rpartition(":")[2]
        self.events_file = folder / "events.jsonl"
        self._log = folder / "coordinator.log"
        self._command = [sys.executable, "-m", "holdfast", "coordinator", "--name", job.name]
        self._command += ["--listen", f"127.0.0.1:{port}", "--store", f"sqlite:{folder / 'store.db'}"]
        self._command += ["--events", str(self.events_file), "--nodes", str(nodes)]
        self._environment = {**os.environ, "HOLDFAST_TOKEN": job.token, "XDG_RUNTIME_DIR": str(folder)}
        self._address = ("127.0.0.1", int(port))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_reachable():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"the coordinator does not come up:\n{self._log.read_text()}")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The currently running process."""
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start a coordinator on the existing store and journal."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment)

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait for its end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @property
    def processor_s(self) -> float:
        """Processor time that all threads of the process have used."""
        # The kernel's clock of another process (clock_getcpuclockid) counts nanoseconds; /proc counts hundredths of
        # seconds.
        return time.clock_gettime((~self.process.pid << 3) | 2)

    @property
    def peak_memory(self) -> int:
        """Peak resident memory of the process, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))

    def read_events(self) -> list[ReadEvent]:
        """Return the events in the journal."""
        return [decode_event(line) for line in self.events_file.read_bytes().splitlines()]

    def committed_steps(self) -> list[int]:
        """Return the committed steps in journal order."""
        return [event.step for event in self.read_events() if isinstance(event, StepCommitted)]

    def _is_reachable(self) -> bool:
        try:
            socket.create_connection(self._address, 1).close()
        except OSError:
            return False
        return True


class ProcessorSampler:
    """Samples the coordinator's processor time in a thread, so that it is known at any moment of a scenario."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self._coordinator = coordinator
        self._times: list[float] = []
        self._values: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def processor_s(self, since: float, until: float) -> float:
        """Return the processor time used between two moments of `time.monotonic`."""
        return self._value_at(until) - self._value_at(since)

    def _value_at(self, moment: float) -> float:
        return self._values[min(bisect_right(self._times, moment), len(self._values) - 1)]

    def _sample(self) -> None:
        while not self._over.is_set():
            self._values.append(self._coordinator.processor_s)
            self._times.append(time.monotonic())
            self._over.wait(SAMPLE_S)


class Scenarios:
    """The scenarios that are measured with one job, one after the other."""

    def __init__(self, coordinator: CoordinatorProcess, fakes: FakeNodes, *, losses: int, step_s: float) -> None:
        self.samples: Samples = defaultdict(list)
        self._coordinator = coordinator
        self._fakes = fakes
        self._losses = losses
        self._step_s = step_s
        self._generation = self._step = 0
        self._idle = 0.0

    def run(self) -> None:
        """Run all scenarios."""
        self.start_nodes()
        self.measure_idle()
        self.measure_steps()
        for _ in range(self._losses):
            self.lose_node(Rendezvous.NCCL)
        if self._losses < len(self._fakes.names) <= GLOO_UP_TO:
            self._fakes.use_keys(Rendezvous.GLOO)
            for _ in range(self._losses):
                self.lose_node(Rendezvous.GLOO)
        self.samples["memory"].append(self._coordinator.peak_memory)
        self.restart_coordinator()
        self.samples["memory"].append(self._coordinator.peak_memory)

    def start_nodes(self) -> None:
        """Start all nodes at once."""
        fakes, coordinator = self._fakes, self._coordinator
        before, at, processor = fakes.look(), time.monotonic(), coordinator.processor_s
        fakes.start()
        self._generation = 1
        look = fakes.until_entered(1, timeout_s=PATIENCE_S)
        self._record("start", look.entered[1].last - at)
        self._record("start_cpu", coordinator.processor_s - processor)
        self._record("start_fakes", look.processor_s - before.processor_s)

    def measure_idle(self) -> None:
        """Measure heartbeats only."""
        time.sleep(self._step_s)
        for _ in range(3):
            at, processor = time.monotonic(), self._coordinator.processor_s
            time.sleep(2 * self._step_s)
            self._record("idle", (self._coordinator.processor_s - processor) / (time.monotonic() - at))
        self._idle = statistics.median(self.samples["idle"])

    def measure_steps(self) -> None:
        """Measure one step per second."""
        self._train()
        for _ in range(3):
            at, processor, count = time.monotonic(), self._coordinator.processor_s, 3
            for turn in range(count):
                self._train()
                time.sleep(max(0.0, at + (turn + 1) * self._step_s - time.monotonic()))
            whole, seconds = self._coordinator.processor_s - processor, time.monotonic() - at
            self._record("step_whole", whole / count)
            self._record("step", (whole - self._idle * seconds) / count)

    def lose_node(self, rendezvous: Rendezvous) -> None:
        """Lose a node in the middle of a step."""
        fakes = self._fakes
        fakes.compute()
        self._wait_until_idle()
        with ProcessorSampler(self._coordinator) as watch:
            before, generation = fakes.look(), self._generation + 1
            unix = time.time() - time.monotonic()
            at = fakes.lose(fakes.names[-1])
            look = fakes.until_entered(generation, timeout_s=PATIENCE_S)
            time.sleep(2 * SAMPLE_S)
        self._generation = generation
        told, entered = look.told[generation].last, look.entered[generation].last
        if rendezvous is Rendezvous.GLOO:
            self._record("gloo", entered - at)
            self._record("gloo_cpu", watch.processor_s(at, entered))
        else:
            self._record("told", told - at)
            self._record("told_cpu", watch.processor_s(at, told))
            started = next(one for one in self._coordinator.read_events() if _is_start_of(one, generation))
            self._record("decided_cpu", watch.processor_s(at, started.time - unix))
            self._record("entered", entered - at)
            self._record("entered_cpu", watch.processor_s(at, entered))
            self._record("entered_fakes", look.processor_s - before.processor_s)
            self._record_traffic(before, look)
        self._train()

    def restart_coordinator(self) -> None:
        """Kill the coordinator, continue training, and start it again on its store."""
        fakes, coordinator = self._fakes, self._coordinator
        coordinator.kill()
        events = len(coordinator.read_events())
        for _ in range(3):
            self._train()
        at = time.monotonic()
        coordinator.start()
        fakes.until_welcomed(2, timeout_s=PATIENCE_S)
        self._record("outage", time.monotonic() - at)
        self._record("outage_cpu", coordinator.processor_s)
        self._train()
        self._train()  # the step before this one is announced with it at the latest
        deadline = time.monotonic() + 10
        while len(coordinator.committed_steps()) < self._step - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        committed = coordinator.committed_steps()
        disturbed = [event for event in coordinator.read_events()[events:] if isinstance(event, _DISTURBED)]
        self._record("lost_steps", len(set(range(1, self._step)) ^ set(committed[: self._step - 1])) + len(disturbed))

    def _wait_until_idle(self) -> None:
        """Wait until the coordinator has processed all messages."""
        deadline, share = time.monotonic() + PATIENCE_S, 1.0
        while share > 1.5 * self._idle + 0.02 and time.monotonic() < deadline:
            at, processor = time.monotonic(), self._coordinator.processor_s
            time.sleep(0.2)
            share = (self._coordinator.processor_s - processor) / (time.monotonic() - at)

    def _train(self) -> None:
        self._step += 1
        self._fakes.train(self._step)

    def _record(self, name: str, value: float) -> None:
        self.samples[name].append(value)

    def _record_traffic(self, before: Look, after: Look) -> None:
        traffic, nodes = after.traffic - before.traffic, len(self._fakes.names)
        self._record("down", traffic.heard / nodes)
        self._record("down_kib", traffic.heard_bytes / nodes)
        self._record("up", traffic.said / nodes)
        self._record("up_kib", traffic.said_bytes / nodes)
        self._record("all_messages", traffic.heard + traffic.said)


_DISTURBED = (FailureDetected, GenerationStarted)


def _is_start_of(event: ReadEvent, generation: int) -> bool:
    return isinstance(event, GenerationStarted) and event.generation == generation


def measure_job(nodes: int, *, workers: int, losses: int, processes: int = 2, step_s: float = 1.0) -> Samples:
    """Run all scenarios with one job of this many fake nodes, spread over processes, at one step per `step_s` seconds.

    Raises:
        TimeoutError: an expected state was not reached in time.
    """
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        job = FakeJob(
            name="fakes",
            url=f"http://127.0.0.1:{port}",
            token=secrets.token_hex(16),
            workers_per_node=workers,
            micro_batches=MICRO_BATCHES * nodes * workers,
        )
        names = [f"n{number}" for number in range(nodes)]
        fakes = FakeNodes(job, names, processes=processes)
        with CoordinatorProcess(Path(folder), job, nodes) as coordinator, fakes:
            scenes = Scenarios(coordinator, fakes, losses=losses, step_s=step_s)
            scenes.run()
    return scenes.samples


def table(samples: Mapping[int, Samples]) -> str:
    """Return one line per figure: values by number of nodes, growth from the fewest to the most nodes, and limits."""
    sizes = sorted(samples)
    first, last = sizes[0], sizes[-1]
    width = max(len(f"{figure.name}, {figure.unit}") for figure in FIGURES.values())
    lines = [f"{'nodes':{width}}" + "".join(f"{size:>22}" for size in sizes) + f"   growth ({last / first:g} x nodes)"]
    for key, figure in FIGURES.items():
        if not any(key in samples[size] for size in sizes):
            continue
        label = f"{figure.name}, {figure.unit}" if figure.unit else figure.name
        cells = [_cell(figure, samples[size].get(key, [])) for size in sizes]
        line = f"{label:{width}}" + "".join(f"{cell:>22}" for cell in cells) + f"   {_growth(samples, key)}"
        lines.append(line.rstrip())
        lines += [f"{'':4}{verdict}" for verdict in _verdicts(figure, {n: samples[n].get(key, []) for n in sizes})]
    return "\n".join(lines)


def _cell(figure: Figure, values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle = figure.format(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({figure.format(min(values))}..{figure.format(max(values))})"


def _growth(samples: Mapping[int, Samples], key: str) -> str:
    sizes = [size for size in sorted(samples) if samples[size].get(key)]
    few, many = (statistics.median(samples[size][key]) for size in (sizes[0], sizes[-1]))
    return f"{many / few:.3g} x" if few > 0 and len(sizes) > 1 else ""


def _verdicts(figure: Figure, values: Mapping[int, Sequence[float]]) -> list[str]:
    lines: list[str] = []
    for nodes, bar in figure.bars.items():
        if values.get(nodes):
            reached = statistics.median(values[nodes]) <= bar
            word = "reached" if reached else "NOT reached"
            lines.append(f"{word} at {nodes} nodes: at most {figure.format(bar)} {figure.unit}".rstrip())
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; return 1 if a limit is not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(SIZES), help="numbers of nodes (default: all)")
    parser.add_argument("--workers", type=int, default=WORKERS, help="workers on each node (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="jobs of each number of nodes (default: %(default)s)")
    parser.add_argument("--losses", type=int, default=3, help="nodes lost in each job (default: %(default)s)")
    parser.add_argument(
        "--processes", type=int, default=2, help="processes that run the fake nodes (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    if min(given.nodes) <= given.losses:
        parser.error(f"--losses {given.losses}: of {min(given.nodes)} nodes, one must be left")
    samples: dict[int, Samples] = {}
    for nodes in sorted(set(given.nodes)):
        for _ in range(given.repeats):
            print(f"{nodes} nodes x {given.workers} workers ...", file=sys.stderr, flush=True)
            found = measure_job(nodes, workers=given.workers, losses=given.losses, processes=given.processes)
            for key, values in found.items():
                samples.setdefault(nodes, {}).setdefault(key, []).extend(values)
    print(table(samples))
    return 1 if "NOT reached" in table(samples) else 0


if __name__ == "__main__":
    sys.exit(main())
