"""Measure the peak memory of leaving, joining and staying nodes in a planned move, and leaks over many moves.

    make bench-move                              runs this and the other benchmarks of moves
    python benchmarks/move_memory.py --moves 100

A job of four nodes has one warm standby. Each move replaces one node by the standby, and the node becomes the standby.
The same five processes therefore take turns.

Peaks come from the kernel (VmHWM of /proc/PID/status, reset by /proc/PID/clear_refs). They are taken over undisturbed
steps before the move, and from the request until the leaving node is warm again. A staying or leaving node is compared
with its own earlier steps, a joining one with the median of all members' earlier steps.

Leaks: after each move, once the job trains steadily, the benchmark sums private and proportional shared memory (Pss),
descriptors, threads and mapped shared memory over workers, agents, the coordinator and other processes. The slope is
the Theil-Sen estimator over the moves from the twentieth on (or after the first fifth), with its 95 % interval. A leak
is reported if the interval is above zero, or above `LEAK_BYTES` per move for memory.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, cast

import asked
from asked import Figure
from ending import end_in_order
from recovery import DENSE, DENSE_ARGS, SETTLE_STEPS, RecoveryBench
from scipy import stats  # pyright: ignore[reportMissingTypeStubs]
from standstill import SuspensionWatch

from holdfast.protocol.events import GenerationStarted, JobStarted, NodeMoved, StandbyReady
from tests.harness.local_job import LocalJob

MB = 1e6
#: Allowed peak of each role: a factor on the peak of its steps, and a constant that does not depend on the model.
#: The constant covers additional memory while two generations overlap: the second group's connections and buffers, a
#: block of state in transfer (read, checked and sent, or received and copied), and memory that the allocator keeps in
#: the threads of the transfer.
ALLOWED = {"stayer": (1.01, 0.0), "leaver": (1.05, 16 * MB), "joiner": (1.05, 16 * MB)}
#: Growth per move, over all processes, below which memory counts as allocator noise instead of a leak.
LEAK_BYTES = 64 << 10
#: With fewer moves, leaks are not reported.
FEWEST_ROWS = 8
#: Undisturbed steps over which a peak is taken.
QUIET_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of processes. `memory` is in bytes."""

    memory: int = 0
    descriptors: int = 0
    threads: int = 0
    shared: int = 0

    def __add__(self, other: Resources) -> Resources:
        sums = map(sum, zip(astuple(self), astuple(other), strict=True))
        return Resources(**dict(zip((field.name for field in fields(Resources)), sums, strict=True)))


def main() -> int:
    """Run the benchmark and print its tables; return 1 if a peak is too high, something leaks, or anything was lost."""
    end_in_order()
    options = _options()
    run = LocalJob(options.script, options.args or DENSE_ARGS, options=("--nodes", "4", "--standbys", "1"))
    with SuspensionWatch() as watch, run as job:
        bench = MemoryBench(job, watch, random.Random(options.seed))
        job.wait(StandbyReady)
        bench.wait_steps(since=0, steps=20)
        bench.move()  # warm-up; afterwards the processes of all five nodes are known
        bench.peaks.clear()
        bench.resources.clear()
        for number in range(1, options.moves + 1):
            bench.move()
            if number % 10 == 0:
                print(f"{number} moves: {bench.describe()}", flush=True)
        code = bench.report()
        asked.write_figures(options.figures, bench.figures())
        return code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--script", type=Path, default=DENSE)
    asked.add_figures_option(parser)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    return parser.parse_args()


class MemoryBench(RecoveryBench):
    """One job with repeated moves."""

    def __init__(self, job: LocalJob, watch: SuspensionWatch, rng: random.Random) -> None:
        super().__init__(job, watch, rng)
        #: By role: pairs of a peak and the peak that it is compared with, in bytes.
        self.peaks: dict[str, list[tuple[int, int]]] = defaultdict(list)
        #: Resources by kind of process, after each move.
        self.resources: list[dict[str, Resources]] = []
        #: Descriptions of leaks; None if there are too few moves.
        self._growing: list[str] | None = None

    def move(self) -> None:
        """Replace one node by the standby, and record the peaks."""
        before, members = self._undisturbed_peaks(), self.job.nodes()
        leaver, since = self.rng.choice(members), len(self.job.events)
        workers = {node: self._worker(node) for node in self._past_members()}
        for pid in workers.values():
            _reset_peak(pid)
        with self.job.client() as client:
            client.move([leaver])
        moved = self.job.wait(NodeMoved, from_node=leaver, since=since)
        self.job.wait(StandbyReady, node=leaver, since=since)
        usual = int(statistics.median(before.values()))
        for node in {*members, moved.to_node} if before else ():
            role = {leaver: "leaver", moved.to_node: "joiner"}.get(node, "stayer")
            pid = self._worker(node)
            if workers.get(node, pid) == pid:  # otherwise the node has a new process
                self.peaks[role].append((_peak(pid), before.get(node, usual)))
        self.wait_steps(since=len(self.job.events), steps=SETTLE_STEPS)
        self.resources.append(self._read_resources())

    def describe(self) -> str:
        """Describe the current resources."""
        return "; ".join(
            f"{kind} {one.memory / MB:.1f} MB, {one.descriptors} descriptors, {one.threads} threads, {one.shared} maps"
            for kind, one in self.resources[-1].items()
        )

    def report(self) -> int:
        """Print the tables; return 1 if a requirement is violated."""
        wrong = list(self._report_peaks())
        rows = self._rows()
        if len(rows) >= FEWEST_ROWS:
            self._growing = list(self._report_leaks(rows))
            wrong += self._growing
        wrong += self.find_losses()
        print(self.watch.report())
        print("wrong: " + ("; ".join(wrong) or "nothing"))
        return 1 if wrong else 0

    def figures(self) -> list[Figure]:
        """Return the peaks, less the constant, relative to the peaks of the steps."""
        peaks = [
            Figure(
                name=f"peak memory of a {role}{f' less {constant / MB:g} MB' if constant else ''} / its steps'",
                values=tuple((peak - constant) / usual for peak, usual in self.peaks[role]),
                asked=factor,
                each=True,
                unit="x",
            )
            for role, (factor, constant) in ALLOWED.items()
        ]
        growing = () if self._growing is None else (float(len(self._growing)),)
        return [
            *peaks,
            Figure(name=f"kinds of things left behind by {len(self.resources)} moves", values=growing, asked=0.0),
        ]

    def _report_peaks(self) -> Iterator[str]:
        print(f"\npeak memory of a worker around a move, MB ({len(self.resources)} moves):")
        for role, pairs in self.peaks.items():
            factor, constant = ALLOWED[role]
            peaks, usual = ([pair[place] / MB for pair in pairs] for place in range(2))
            over = [peak - usual for peak, usual in zip(peaks, usual, strict=True)]
            worst = max(peak - factor * usual for peak, usual in pairs)
            wanted = f"<= {factor:g}x" + (f" + {constant / MB:g} MB" if constant else "")
            print(f"  {role:8s} {_spread(peaks)}; its steps {_spread(usual)}; more {_spread(over)}; wanted: {wanted}")
            if worst > constant:
                yield f"a {role}'s peak is {(worst - constant) / MB:.1f} MB too high"

    def _rows(self) -> list[dict[str, Resources]]:
        """Return the resources from the twentieth move on, or after the first fifth."""
        return self.resources[min(20, len(self.resources) // 5) :]

    def _report_leaks(self, rows: list[dict[str, Resources]]) -> Iterator[str]:
        first = len(self.resources) - len(rows) + 1
        print(f"growth per move over {len(rows)} moves, from the {first}th on: slope (95 % interval)")
        for kind in rows[0]:
            for field in fields(Resources):
                values = [getattr(row.get(kind, Resources()), field.name) for row in rows]
                fit: Any = cast(Any, stats).theilslopes(values, range(len(values)))
                slope, low, high = (float(one) for one in (fit.slope, fit.low_slope, fit.high_slope))
                print(
                    f"  {kind:12s} {field.name:12s} {slope:10.3f} ({low:.3f}..{high:.3f}), {values[0]} -> {values[-1]}"
                )
                if low > (LEAK_BYTES if field.name == "memory" else 0.0):
                    yield f"{kind}: {field.name} grow by {slope:.3g} a move"

    # ---- reading ----

    def _undisturbed_peaks(self) -> dict[str, int]:
        """Return the peak of each member over some undisturbed steps."""
        workers = {node: self._worker(node) for node in self.job.nodes()}
        for pid in workers.values():
            _reset_peak(pid)
        self.wait_steps(since=len(self.job.events), steps=QUIET_STEPS)
        return {node: _peak(pid) for node, pid in workers.items()}

    def _past_members(self) -> set[str]:
        """Return all nodes that have been members."""
        return {node for begun in self.job.all(GenerationStarted) for node in begun.members}

    def _worker(self, node: str) -> int:
        return self.job.pids(node)[1][0]

    def _read_resources(self) -> dict[str, Resources]:
        assert self.job.process is not None
        kinds = {self.job.wait(JobStarted).coordinator_pid: "coordinator"}
        for node in self._past_members():
            agent, workers = self.job.pids(node)
            kinds[agent] = "agents"
            kinds.update(dict.fromkeys(workers, "workers"))
        found: dict[str, Resources] = {}
        for pid in _process_tree(self.job.process.pid):
            kind = kinds.get(pid, "the rest")
            found[kind] = found.get(kind, Resources()) + _read_process(pid)
        return dict(sorted(found.items()))


def _reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peak(pid: int) -> int:
    """Return the peak memory of a process since the last reset, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _read_process(pid: int) -> Resources:
    """Return the resources of a process, or none if it has just ended."""
    folder = Path(f"/proc/{pid}")
    try:
        found = re.search(r"\nPss:\s+(\d+) kB", (folder / "smaps_rollup").read_text())
        maps = (folder / "maps").read_text().splitlines()
        return Resources(
            memory=int(found[1]) << 10 if found else 0,
            descriptors=len(os.listdir(folder / "fd")),
            threads=len(os.listdir(folder / "task")),
            shared=sum("/dev/shm/" in line or "/memfd:" in line for line in maps),
        )
    except (FileNotFoundError, ProcessLookupError):
        return Resources()


def _process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                children[int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])].append(int(name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    family = [pid]
    for one in family:
        family += children[one]
    return family


def _spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.1f} (min {min(values):.1f}..max {max(values):.1f})"


if __name__ == "__main__":
    sys.exit(main())
