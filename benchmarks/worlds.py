"""Measure the cost of a failure and of a join by world size: real jobs of 4 to 64 ranks on one machine.

    make bench-worlds              4, 8, 16, 32 and 64 ranks
    python benchmarks/worlds.py --worlds 4x1,8x4 --kills 5

Each node is a network namespace with its own stack and address, connected by a bridge. Its workers are forked from one
process. The accelerators are emulated (paced.py): a step takes 1 s in any world, so that the cores are free for the job
itself. All ranks share these cores, unlike in a cluster: 64 ranks on two cores are 32 per core. Down = from the kill of
an entire node to the first step committed without it, less the median undisturbed step. Regroup is the part in which
the survivors build their groups. A node joins after each kill; its stall is the longest step meanwhile, less the
median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from ending import end_in_order
from standstill import SuspensionWatch

from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    NodesJoined,
    Recovered,
    RolledBack,
    StepCommitted,
)
from tests.harness.namespaces import NamespacesRefusedError, NetworkJob, joined

SCRIPT = Path(__file__).resolve().parent / "paced.py"
MICRO_BATCHES = 256
ARGS = ("--step-seconds", "1", "--micro-batches", str(MICRO_BATCHES))
WORLDS = "4x1,8x1,4x4,8x4,8x8"
#: Undisturbed steps at the start, and after each change.
FIRST_STEPS, SETTLE_STEPS = 8, 4
#: The code of an established connection in /proc/net/tcp.
ESTABLISHED = "01"
#: Time limit in seconds for a world to start, or a node to join.
COME_S = 300.0


@dataclass
class Figures:
    """Measurements of one world; times are in seconds."""

    nodes: int
    workers: int
    start: float = 0.0
    step: float = 0.0
    down: list[float] = field(default_factory=list[float])
    decide: list[float] = field(default_factory=list[float])
    regroup: list[float] = field(default_factory=list[float])
    stall: list[float] = field(default_factory=list[float])
    connections: list[int] = field(default_factory=list[int])
    threads: list[int] = field(default_factory=list[int])
    #: Memory in MiB: proportional, which includes a share of shared memory, and private.
    proportional: list[float] = field(default_factory=list[float])
    private: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])


def main() -> int:
    """Run all worlds and print the table; return 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default=WORLDS, help="comma-separated worlds as nodes x workers per node")
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    # Namespaces outlive the process that made them, so they must be removed however this ends.
    end_in_order()
    table: list[Figures] = []
    with SuspensionWatch() as watch:
        for world in options.worlds.split(","):
            nodes, workers = map(int, world.split("x"))
            try:
                table.append(measure_world(Figures(nodes, workers), options.kills))
            except NamespacesRefusedError as error:
                print(error, file=sys.stderr)
                return 2
        print(watch.report())
    report(table)
    return 1 if any(figures.wrong for figures in table) else 0


def measure_world(figures: Figures, kills: int) -> Figures:
    """Run one world, and repeatedly kill a node and add another one."""
    began = time.time()
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-") as folder,
        joined(figures.nodes) as network,
        NetworkJob(
            network,
            SCRIPT,
            ARGS,
            nodes=figures.nodes,
            workers=figures.workers,
            folder=Path(folder),
        ) as job,
    ):
        first = job.wait(StepCommitted, timeout=COME_S)
        figures.start = first.time - began
        print_progress(figures, f"first step after {figures.start:.1f} s")
        wait_steps(job, FIRST_STEPS)
        record_processes(job, figures)
        killed: set[str] = set()
        for number in range(kills):
            figures.step = undisturbed_step(job, figures)
            # The victims cover all levels: neighbours in the plan, and its ends.
            victim = job.nodes()[(number * 3) % figures.nodes]
            killed.add(victim)
            kill_node(job, figures, victim)
            add_node(job, figures, victim, number)
        figures.wrong += find_losses(job, killed)
    print(format_line(figures), flush=True)
    return figures


def kill_node(job: NetworkJob, figures: Figures, victim: str) -> None:
    """Kill all processes of a node with SIGKILL."""
    since, at = len(job.events), job.signal_node(victim)
    generation = job.wait(GenerationStarted, lambda e: victim not in e.members, since=since, timeout=COME_S)
    first = job.wait(StepCommitted, lambda e: e.time > generation.time, since=since, timeout=COME_S)
    recovered = job.wait(Recovered, since=since)
    figures.down.append(first.time - at - figures.step)
    figures.decide.append(recovered.decide_s)
    figures.regroup.append(recovered.regroup_s)
    print_progress(figures, f"down {first.time - at:.2f} s, less the step {figures.down[-1]:.2f} s")
    wait_steps(job, SETTLE_STEPS)


def add_node(job: NetworkJob, figures: Figures, victim: str, number: int) -> None:
    """Add a node in the namespace of the killed one."""
    since, node = len(job.events), f"{victim.split('.')[0]}.{number}"
    job.add(victim.split(".")[0], node)
    joined_ = job.wait(NodesJoined, lambda e: node in e.names, since=since, timeout=COME_S)
    job.wait(GenerationStarted, lambda e: node in e.members, since=since, timeout=COME_S)
    wait_steps(job, SETTLE_STEPS)
    steps = [e for e in job.events[job.events.index(joined_) :] if isinstance(e, StepCommitted)]
    figures.stall.append(max(e.step_s for e in steps) - figures.step)
    print_progress(figures, f"{node} joined: a stall of {figures.stall[-1]:.2f} s")


def print_progress(figures: Figures, what: str) -> None:
    """Print a measurement."""
    print(f"{figures.nodes}x{figures.workers}: {what}", file=sys.stderr, flush=True)


def wait_steps(job: NetworkJob, steps: int) -> None:
    """Wait for this many steps."""
    wanted = job.all(StepCommitted)[-1].step + steps
    job.wait(StepCommitted, lambda e: e.step >= wanted, timeout=COME_S)


def undisturbed_step(job: NetworkJob, figures: Figures) -> float:
    """Return the median seconds of the steps of the complete world; disturbed steps are too few to matter."""
    whole = [e.step_s for e in job.all(StepCommitted)[3:] if e.world_size == figures.nodes * figures.workers]
    return statistics.median(whole)


def find_losses(job: NetworkJob, killed: set[str]) -> list[str]:
    """Return lost steps, samples, and nodes that failed without being killed."""
    steps = [e.step for e in job.all(StepCommitted)]
    wrong = [] if steps == list(range(1, len(steps) + 1)) else ["steps are missing or doubled"]
    wrong += [f"step {e.step} has {e.samples} samples" for e in job.all(StepCommitted) if e.samples != MICRO_BATCHES]
    wrong += [f"rolled back to {e.to_step}" for e in job.all(RolledBack)]
    wrong += [f"{e.node} failed: {e.kind} {e.detail}" for e in job.all(FailureDetected) if e.node not in killed]
    return wrong


# ---- processes ----


def record_processes(job: NetworkJob, figures: Figures) -> None:
    """Record each rank's connections, threads and memory."""
    for node in job.nodes():
        for pid in job.pids(node)[1]:
            figures.connections.append(count_connections(pid))
            figures.threads.append(len(os.listdir(f"/proc/{pid}/task")))
            memory = _memory(pid)
            figures.proportional.append(memory["Pss"])
            figures.private.append(memory["Private_Clean"] + memory["Private_Dirty"])


def count_connections(pid: int) -> int:
    """Return the number of established TCP connections of a process."""
    links = (f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd"))
    mine = {target[8:-1] for target in map(_target, links) if target.startswith("socket:[")}
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == ESTABLISHED and row[9] in mine for row in rows)


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def _memory(pid: int) -> dict[str, float]:
    rows = [row.split() for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]]
    return {row[0].rstrip(":"): int(row[1]) / 1024 for row in rows}


# ---- the result ----


def report(table: list[Figures]) -> None:
    """Print the figures of all worlds in one table."""
    print(f"\n{'world':>10} {HEAD}")
    for figures in table:
        print(format_line(figures))
    wrong = [f"{figures.nodes}x{figures.workers}: {what}" for figures in table for what in figures.wrong]
    print("lost: " + ("; ".join(wrong) or "nothing (steps 0, samples 0, survivors 0)"))


HEAD = (
    f"{'up s':>6} {'step ms':>8}  {'down less a step, s':22} {'decide s':>8} {'regroup s':>9}  "
    f"{'stall of a join, s':22} {'connections':>11} {'threads':>7} {'MiB a rank (alone)':>18}"
)


def format_line(figures: Figures) -> str:
    """Return one world's figures: medians, and the range of the costs of kills and joins."""
    world = f"{figures.nodes}x{figures.workers}={figures.nodes * figures.workers}"
    memory = f"{statistics.median(figures.proportional):.0f} ({statistics.median(figures.private):.0f})"
    return (
        f"{world:>10} {figures.start:6.1f} {figures.step * 1e3:8.0f}  {spread(figures.down):22} "
        f"{statistics.median(figures.decide):8.3f} {statistics.median(figures.regroup):9.3f}  "
        f"{spread(figures.stall):22} {statistics.median(figures.connections):11.0f} "
        f"{statistics.median(figures.threads):7.0f} {memory:>18}"
    )


def spread(values: list[float]) -> str:
    """Format median, extremes and count."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f}; {len(values)})"


if __name__ == "__main__":
    sys.exit(main())
