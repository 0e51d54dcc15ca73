"""Measure how fast failures are detected and whether the right node is named, compared with Table 2 of Unicron.

    make bench-detect              everything: ten runs of each kind, false alarms, the cost of watching
    python benchmarks/detect.py --runs 3 --only "lost node" "exception"
    python benchmarks/detect.py --only alarms cost

The recovery benchmark's dense job runs on 4 nodes. For a lost node and a killed process, the time starts when they are
killed. For an exception it starts when the worker begins the step in which it raises at once. For a hung thread, a
stopped process and a stopped node it starts with the step in which they are stopped. A silent link (in network
namespaces, a node whose packets no longer arrive) is timed from the cut.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from detect_record import RECORDED, load_recording, record_job, wait_for_step_start
from recovery import DENSE, DENSE_ARGS, format_spread
from standstill import SuspensionWatch

from holdfast.protocol.events import FailureDetected, GenerationStarted, StepCommitted
from tests.harness.local_job import JobTimeoutError, LocalJob
from tests.harness.namespaces import NamespacesRefusedError, NetworkJob, joined
from tests.simulation.fakes.played_steps import PlayedSteps

NODES = 4
WARM_STEPS = 20
PHASES = ("compute", "reducing", "ready", "voted", "passed")
#: Unicron, Table 2: detection times with Unicron, and without it (D_timeout: 30 minutes).
TABLE_2 = {
    "lost node": ("5.6 s", "5.7 s"),
    "killed process": ("1.8 s", "30 min"),
    "exception": ("0.3 s", "30 min"),
    "hung thread": ("3 x D_iter", "30 min"),
    "stopped process": ("3 x D_iter", "30 min"),
    "stopped node": ("3 x D_iter", "30 min"),
    "silent link": ("", ""),
}
PARTS = (*TABLE_2, "alarms", "cost")
ALARM_STEPS, REAL_STEPS = 20_000, 2000
COST_STEPS = 60


@dataclass
class DetectionResults:
    """Results of one kind of failure, in seconds, and the failures that were reported wrongly."""

    #: Seconds until the failure was detected.
    detected_s: list[float] = field(default_factory=list[float])
    #: Seconds until the next committed step.
    committed_s: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class CausedFailure:
    """A failure that was caused on a node."""

    node: str
    at: float
    #: When the step began in which it was caused, or `at` if the failure itself counts.
    begun: float
    undo: Callable[[], None] = lambda: None


class DetectionBench:
    """One job that is harmed repeatedly, and restored to all its nodes each time."""

    def __init__(self, job: LocalJob, rng: random.Random, tallies: dict[str, DetectionResults]) -> None:
        self.job = job
        self.rng = rng
        self.tallies = tallies

    def median_step(self) -> float:
        """Return the median seconds of all steps with all nodes."""
        return statistics.median(event.step_s for event in self.job.all(StepCommitted)[3:] if event.world_size == NODES)

    def cause_each(self, only: Collection[str]) -> None:
        """Cause one failure of each of these kinds."""
        kinds = (
            self.lost_node,
            self.killed_process,
            self.exception,
            self.hung_thread,
            self.stopped_process,
            self.stopped_node,
        )
        for kind in kinds:
            if (name := kind.__name__.replace("_", " ")) in only:
                self.cause(name, kind)

    def cause(self, kind: str, blow: Callable[[], CausedFailure]) -> None:
        """Cause one failure, and record how it was detected and recovered from."""
        since, tally = len(self.job.events), self.tallies.setdefault(kind, DetectionResults())
        struck = blow()
        try:
            failure = self.job.wait(FailureDetected, since=since, timeout=60.0)
        except JobTimeoutError:
            tally.wrong.append("never detected")
            struck.undo()
            return
        tally.detected_s.append(failure.time - struck.begun)
        if failure.node != struck.node:
            tally.wrong.append(f"{failure.node} instead of {struck.node}: {failure.detail}")
        generation = self.job.wait(GenerationStarted, since=self.job.events.index(failure))
        place = self.job.events.index(generation)
        commit = self.job.wait(StepCommitted, lambda e: e.time > generation.time, since=place)
        tally.committed_s.append(commit.time - struck.begun)
        said = f"{kind:16s} seen {tally.detected_s[-1]:6.3f} s, next commit {tally.committed_s[-1]:6.3f} s"
        print(f"{said}; {failure.node}: {failure.detail[:100]}", flush=True)
        struck.undo()
        self.restore(place)

    def restore(self, since: int) -> None:
        """Restore the job to all its nodes, and train for a while."""
        members = self.job.nodes()
        for _ in range(NODES - len(members)):
            if not self._rejoins(since):
                self.job.call("scale", "+1")
        full = self.job.wait(GenerationStarted, lambda e: e.world_size == NODES, since=since)
        last = self.job.wait(StepCommitted, since=self.job.events.index(full)).step
        self.job.wait(StepCommitted, lambda e: e.step >= last + WARM_STEPS, since=since)

    def _rejoins(self, since: int) -> bool:
        """Return whether a node without workers starts new workers without help."""
        try:
            self.job.wait(
                GenerationStarted, lambda e: e.world_size == NODES, since=since, timeout=10.0 + 20 * self.median_step()
            )
        except JobTimeoutError:
            return False
        return True

    # ---- the kinds of harm ----

    def _wait_random_moment(self) -> float:
        """Wait until a uniformly random moment of a step; return when that step began."""
        self.job.wait(StepCommitted, since=len(self.job.events))
        time.sleep(self.rng.random() * self.median_step())
        return self.job.all(StepCommitted)[-1].time

    def _choose_node(self) -> str:
        return self.rng.choice(self.job.nodes())

    def lost_node(self) -> CausedFailure:
        """Kill all processes of a node with SIGKILL."""
        self._wait_random_moment()
        node = self._choose_node()
        at = self.job.signal_node(node)
        return CausedFailure(node, at, at)

    def killed_process(self) -> CausedFailure:
        """Kill a worker with SIGKILL."""
        self._wait_random_moment()
        node = self._choose_node()
        at = time.time()
        os.kill(self.job.pids(node)[1][0], signal.SIGKILL)
        return CausedFailure(node, at, at)

    def exception(self) -> CausedFailure:
        """Raise an exception in a script at the start of a step."""
        node, step = self._choose_node(), self._next_step()
        self.job.inject("raise", node, step=step, phase="compute")
        at = wait_for_step_start(step, self.job.pids(node)[0])
        return CausedFailure(node, at, at)

    def hung_thread(self) -> CausedFailure:
        """Block a training thread at a random phase of a step."""
        node, step = self._choose_node(), self._next_step()
        self.job.inject("hold", node, step=step, phase=self.rng.choice(PHASES))
        at = self.job.wait(StepCommitted, step=step - 1).time
        return CausedFailure(node, at, at)

    def stopped_process(self) -> CausedFailure:
        """Stop a worker with SIGSTOP."""
        begun, node = self._wait_random_moment(), self._choose_node()
        worker = self.job.pids(node)[1][0]
        os.kill(worker, signal.SIGSTOP)
        return CausedFailure(node, time.time(), self._current_step_start(begun))

    def stopped_node(self) -> CausedFailure:
        """Stop all processes of a node with SIGSTOP, and continue them afterwards."""
        begun, node = self._wait_random_moment(), self._choose_node()
        at = self.job.signal_node(node, signal.SIGSTOP)
        return CausedFailure(node, at, self._current_step_start(begun), lambda: self._continue(node))

    def _continue(self, node: str) -> None:
        self.job.signal_node(node, signal.SIGCONT)

    def _current_step_start(self, begun: float) -> float:
        """Return when the current step began: another step may have started since the moment was chosen."""
        time.sleep(0.01)
        return max(begun, self.job.all(StepCommitted)[-1].time)

    def _next_step(self) -> int:
        return self.job.all(StepCommitted)[-1].step + 3


def run_kinds(only: Collection[str], runs: int, seed: int) -> tuple[dict[str, DetectionResults], float]:
    """Cause failures of these kinds in several jobs; return the results and the median step in seconds.

    Each job suffers each kind at most twice: an exception on three nodes would be attributed to the script and end the
    job.
    """
    rng, tallies, steps = random.Random(seed), dict[str, DetectionResults](), list[float]()
    for first in range(0, runs, 2):
        with LocalJob(DENSE, DENSE_ARGS, options=("--nodes", str(NODES), "--allow-faults")) as job:
            bench = DetectionBench(job, rng, tallies)
            job.wait(StepCommitted, step=2 * WARM_STEPS)
            for _ in range(first, min(first + 2, runs)):
                bench.cause_each(only)
            steps.append(bench.median_step())
    return tallies, statistics.median(steps)


def cut_links(runs: int) -> DetectionResults:
    """Take a node's link down silently, each time in a new job."""
    tally = DetectionResults()
    for number in range(runs):
        with joined(NODES) as network, tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            job = NetworkJob(network, DENSE, DENSE_ARGS, nodes=NODES, folder=Path(folder))
            with job:
                job.wait(StepCommitted, step=WARM_STEPS)
                since, node = len(job.events), f"node-{1 + number % (NODES - 1)}"
                at = time.time()
                network.link_down(node)
                failure = job.wait(FailureDetected, since=since, timeout=60.0)
                tally.detected_s.append(failure.time - at)
                tally.wrong += [f"{failure.node} instead of {node}"] if failure.node != node else []
                print(
                    f"{'silent link':16s} seen {tally.detected_s[-1]:6.3f} s; {failure.node}: {failure.kind}",
                    flush=True,
                )
    return tally


# ---- false alarms ----


def has_simulated_alarms(steps: int) -> bool:
    """Simulate steps with recorded times; return True if hang detection reported a worker that was not hung."""
    if not RECORDED.exists():
        record_job(RECORDED)
    known = load_recording()
    found = PlayedSteps(known["times"], micro_batches=known["micro_batches"]).run(steps)
    print(f"\n{steps} steps on times recorded of {known['what']}, a checkpoint every 50, an evaluation every 500:")
    print(f"  {found.seconds:.0f} s of training; {found.probes} probes, of which {found.late} found a late worker")
    print(f"  false alarms: {len(found.alarms)}", *found.alarms[:5], sep="\n    ")
    each, some = known["micro_batches"], min(steps, 2000)
    slow = {(step, step % (NODES * each)): 10.0 for step in range(100, some, 100)}
    slowed = PlayedSteps(known["times"], micro_batches=each, slow=slow).run(some)
    print(
        f"  {len(slow)} micro-batches that take 10 x as long: {len(slowed.alarms)} workers ended, at most one for each"
    )
    return bool(found.alarms) or len(slowed.alarms) > len(slow)


def has_real_alarms(steps: int) -> bool:
    """Train this many steps without failures; return True if a failure was reported."""
    with LocalJob(DENSE, DENSE_ARGS, options=("--nodes", str(NODES))) as job:
        deadline = 60.0 + 5.0 * steps
        job.wait(StepCommitted, step=steps, timeout=deadline)
        found = job.all(FailureDetected)
        step_s = statistics.median(event.step_s for event in job.all(StepCommitted)[3:])
    load = (
        f"{NODES} workers on {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}, median step {step_s * 1e3:.0f} ms"
    )
    print(f"{steps} real steps ({load}): {len(found)} false alarms", *(one.detail for one in found), sep="\n    ")
    return bool(found)


# ---- cost of hang detection ----


def _cpu_s(session: int) -> float:
    """Return the processor time of all processes of a session so far, in seconds."""
    total, tick = 0.0, os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session:
                total += sum(map(int, fields[11:13])) / tick
    return total


def processor_s_per_step(*, watched: bool, steps: int) -> float:
    """Return the processor seconds per step of a job, over all its processes."""
    options = ("--nodes", str(NODES), "--set", f"experiments.watch={'true' if watched else 'false'}")
    with LocalJob(DENSE, DENSE_ARGS, options=options) as job:
        job.wait(StepCommitted, step=WARM_STEPS)
        assert job.process is not None
        begin = _cpu_s(job.process.pid)
        job.wait(StepCommitted, step=WARM_STEPS + steps)
        return (_cpu_s(job.process.pid) - begin) / steps


def print_cost(turns: int, steps: int) -> None:
    """Print the cost of hang detection, measured alternately with and without it."""
    pairs = [
        (processor_s_per_step(watched=True, steps=steps), processor_s_per_step(watched=False, steps=steps))
        for _ in range(turns)
    ]
    ratios = [on / off for on, off in pairs]
    on, off = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"\nprocessor time per step, {turns} turns of {steps} steps:")
    print(f"  watched {on * 1e3:.1f} ms, not {off * 1e3:.1f} ms; ratio {format_spread(ratios)}, at most 1.005")


# ---- the table ----


def table_lines(tallies: dict[str, DetectionResults], step_s: float) -> Iterator[str]:
    """Yield the lines of Unicron's Table 2 with the measured times added."""
    bounds = {
        "lost node": 0.1,
        "killed process": 0.05,
        "exception": 0.05,
        "silent link": 2.0,
        **dict.fromkeys(("hung thread", "stopped process", "stopped node"), 3 * step_s + 0.2),
    }
    yield f"\nmedian step {step_s * 1e3:.0f} ms (D_iter); seconds until detection, then until the next commit"
    yield f"{'case':16s} {'Unicron':>11s} {'without':>8s} {'at most':>8s}  ours"
    for kind, (unicron, without) in TABLE_2.items():
        tally = tallies.get(kind, DetectionResults())
        yield f"{kind:16s} {unicron:>11s} {without:>8s} {bounds[kind]:8.3f}  {format_spread(tally.detected_s)}"
        if kind in ("hung thread", "stopped process", "stopped node"):
            yield f"{'':47s}commit {format_spread(tally.committed_s)}, at most {4.5 * step_s + 0.5:.3f}"
        yield from (f"{'':47s}WRONG: {wrong}" for wrong in tally.wrong)


def main() -> int:
    """Run the benchmark; return 1 if a wrong node was named or there was a false alarm."""
    options = _options()
    if options.record:
        record_job(RECORDED)
        return 0
    only, wrong = options.only or PARTS, False
    with SuspensionWatch() as watch:
        if any(kind in only for kind in TABLE_2):
            tallies, step_s = run_kinds(only, options.runs, options.seed)
            try:
                tallies["silent link"] = cut_links(options.runs if "silent link" in only else 0)
            except NamespacesRefusedError as error:
                print(f"no silent links: {error}")
            print(*table_lines(tallies, step_s), sep="\n")
            wrong = any(tally.wrong for tally in tallies.values())
        if "alarms" in only:
            wrong |= has_simulated_alarms(options.steps)
            wrong |= has_real_alarms(options.real_steps)
        if "cost" in only:
            print_cost(options.turns, COST_STEPS)
        print(watch.report())
    return 1 if wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=ALARM_STEPS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real-steps", type=int, default=REAL_STEPS, help="steps of a real job without failures")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="run only these parts")
    parser.add_argument("--record", action="store_true", help="record a job's times for the simulated steps, and end")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
