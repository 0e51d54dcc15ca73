"""Compare the pool's plan with shrinking only the hit job: three jobs on eight nodes that fail and return.

    make bench-waf                                          three seeds, both policies: about 20 minutes
    python benchmarks/pool_waf.py --seeds 1 --seconds 90
    python benchmarks/pool_waf.py --record FILE             also write a recording of each run

Both policies really run on the same seeded trace. `waf` divides the nodes by the measurements of the jobs. With `sized`
each job starts with the nodes that `waf` gave it, only the hit job shrinks, and a returning node goes to the job with
the earliest submission that misses a node (Unicron, section 7.5, except for the order of the hit jobs). Each
micro-batch takes a stated time (`--emulate-compute`), so that a smaller world is slower even on two cores. The jobs
differ in weight and in micro-batches per step, and therefore in how well they scale.

WAF = weight x FLOP of the samples that a job has committed, less undone ones, summed over all jobs. A sample counts as
`FLOP`. All figures come from the jobs' event files. They are printed with the simulator's prediction for the same
trace, which uses the measurements of that run (`benchmarks/real_run.py`): steps by number of nodes, and durations of
losses, planned changes and arrivals. Predictions for policies that did not run are printed too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
from ending import end_in_order
from pool_faults import TINY
from pool_waf_record import RunStart, record_run
from standstill import SuspensionWatch

from benchmarks.real_run import Durations, NodeChange, RealRun, measure_durations, predict
from tests.harness.local_pool import LocalPool

NODES = 8
FLOP = 1e9


@dataclass(frozen=True)
class Job:
    """A job: `samples` per step; a micro-batch of four samples takes `micro_batch_s` seconds."""

    name: str
    weight: float
    samples: int
    micro_batch_s: float


#: Eight micro-batches take two rounds on four nodes, three on three nodes. Twelve scale evenly. Two need two nodes.
JOBS = (Job("heavy", 3.0, 32, 0.5), Job("long", 1.0, 48, 0.4), Job("short", 1.25, 8, 0.35))
#: Mean seconds between failures, range of seconds until a node returns, and largest number of missing nodes.
APART_S, AWAY_S, MOST_AWAY = 18.0, (60.0, 90.0), 2
#: A pool is stable after this many seconds without a plan or a new generation.
QUIET_S = 10.0
#: Allowed relative error of the simulator.
WITHIN = 0.1
#: Policies that are only simulated.
SIMULATED = ("hit-only", "equal", "weighted")


def draw_trace(seed: int, seconds: float) -> list[NodeChange]:
    """Return the failures and returns of nodes; each node except the pool's own fails equally often."""
    rng = Random(seed)
    struck: list[NodeChange] = []
    away: dict[str, float] = {}
    at = rng.expovariate(1 / APART_S)
    while at < seconds:
        away = {node: back for node, back in away.items() if back > at}
        if len(away) < MOST_AWAY:
            node = rng.choice([name for name in _other_nodes() if name not in away])
            away[node] = at + rng.uniform(*AWAY_S)
            struck += [NodeChange(at, node, "lost"), NodeChange(away[node], node, "back")]
        at += rng.expovariate(1 / APART_S)
    return sorted((one for one in struck if one.at < seconds), key=lambda one: one.at)


def _other_nodes() -> list[str]:
    return [f"m{number}" for number in range(1, NODES)]


class Nodes:
    """The nodes' agents, killed and started according to the trace."""

    def __init__(self, pool: LocalPool) -> None:
        self._pool = pool
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def add(self, nodes: Sequence[str]) -> None:
        """Start nodes, and wait until the pool has them. The pool's own node always exists and never fails."""
        before = len(self._pool.events("node_added"))
        for node in nodes:
            self.start(node)
        self._pool.wait(lambda: len(self._pool.events("node_added")) == before + len(nodes), "its nodes")

    def start(self, node: str) -> None:
        """Start a node's agent."""
        command = [sys.executable, "-m", "holdfast", "agent", "--node-name", node]
        with self._pool.log.open("ab") as log:
            self._agents[node] = subprocess.Popen(
                command, env=self._pool.environment, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )

    def kill(self, node: str) -> None:
        """Kill a node's agent; its child processes die with it."""
        self._agents[node].kill()
        self._agents[node].wait()

    def stop_all(self) -> None:
        """End all agents."""
        for agent in self._agents.values():
            agent.send_signal(signal.SIGINT)
        for agent in self._agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(timeout=30)


def main() -> int:
    """Run the benchmark and print its tables.

    Returns:
        1 if the pool's plan achieved less than shrinking the hit job, or if the simulator is inaccurate, else 0.
    """
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the recordings of all runs to this file")
    given = parser.parse_args()
    wrong: list[str] = []
    runs: list[RealRun] = []
    with SuspensionWatch() as watch:
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            struck = draw_trace(seed, given.seconds)
            ours = run("waf", struck, given.seconds)
            beside = run("sized", struck, given.seconds, ours.first)
            wrong += print_trace(seed, [ours, beside])
            if given.record is not None:
                runs += [ours, beside]
                given.record.write_bytes(msgspec.json.encode(runs))
        print(watch.report())
    print("\n".join(wrong) or "our policy was never below the other one; the simulator's error was never above a tenth")
    return int(bool(wrong))


def run(policy: str, struck: list[NodeChange], seconds: float, first: Mapping[str, str] | None = None) -> RealRun:
    """Run a pool and its jobs for some seconds, and return the recording.

    Args:
        first: the job of each node at the start, which later has no more nodes; None lets all jobs use all nodes.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        Path(folder).chmod(0o700)
        pool = LocalPool(Path(folder), 1, "--policy", policy, "--reserve", "0")
        nodes = Nodes(pool)
        try:
            if first is None:
                nodes.add(_other_nodes())
                for job in JOBS:
                    submit(pool, job, NODES)
            else:
                start_with(pool, nodes, first)
            wait_until_stable(pool)
            begun = time.time()
            play_trace(nodes, struck, begun, seconds)
            most = Counter(first.values()) if first is not None else {job.name: NODES for job in JOBS}
            begin = RunStart(begun, policy, seconds, tuple(struck), most, {job.name: job.weight for job in JOBS}, FLOP)
            found = record_run(pool, begin)
            assert first is None or found.first == first, f"jobs have {found.first} at the start, not {first}"
            return found
        finally:
            nodes.stop_all()
            pool.process.send_signal(signal.SIGINT)
            pool.process.wait()
            for pid, _ in pool.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def start_with(pool: LocalPool, nodes: Nodes, first: Mapping[str, str]) -> None:
    """Start each job with its assigned nodes by starting these after the job; the pool's own node exists already."""
    own = next(node for node in first if node not in _other_nodes())
    for job in sorted(JOBS, key=lambda job: job.name != first[own]):
        mine = [node for node in first if first[node] == job.name]
        nodes.add([node for node in mine if node != own])
        submit(pool, job, len(mine))
        pool.wait(lambda job=job, mine=mine: len(pool.job(job.name)["nodes"]) == len(mine), f"nodes of {job.name}")


def submit(pool: LocalPool, job: Job, most: int) -> None:
    """Submit a job with checkpoints, so that it does not lose all progress with its last node."""
    options = (
        *("--set", f"weight={job.weight}", "--flop-per-sample", str(FLOP)),
        *("--emulate-compute", f"{job.micro_batch_s}/micro-batch"),
        *("--checkpoint-dir", str(pool.folder / f"saved-{job.name}"), "--checkpoint-every", "5"),
    )
    pool.submit(
        job.name, f"1:{most}", TINY, "--steps", "100000000", "--global-batch", str(job.samples), options=options
    )


def wait_until_stable(pool: LocalPool) -> None:
    """Wait until all jobs train and the plan is stable, so that step times have been measured."""
    names = [job.name for job in JOBS]
    pool.goes_on(*names, steps=6)

    def quiet() -> bool:
        last = [event["time"] for event in pool.events("plan_decided", "node_granted", "node_released")]
        last += [event["time"] for name in names for event in pool.events_of(name, "generation_started")]
        return time.time() - max(last) > QUIET_S

    pool.wait(quiet, "a stable plan")


def play_trace(nodes: Nodes, struck: list[NodeChange], begun: float, seconds: float) -> None:
    """Run the trace in real time."""
    for one in struck:
        time.sleep(max(0.0, begun + one.at - time.time()))
        (nodes.start if one.what == "back" else nodes.kill)(one.node)
    # Wait for steps that cross the end.
    time.sleep(max(0.0, begun + seconds + max(job.samples / 4 * job.micro_batch_s for job in JOBS) - time.time()))


def print_trace(seed: int, runs: list[RealRun]) -> list[str]:
    """Print the results of one trace; return violated requirements."""
    wrong: list[str] = []
    lost = sum(one.what == "lost" for one in runs[0].struck)
    sizes = ", ".join(f"{name} {nodes}" for name, nodes in sorted(Counter(runs[0].first.values()).items()))
    print(f"seed {seed}: {lost} nodes lost in {runs[0].seconds:.0f} s; nodes at the start: {sizes}")
    print(f"  {'':8}{'TFLOP':>9}{'simulated':>11}{'error':>8}   by job, real and simulated; measured durations, s")
    for real in runs:
        found, measured = predict(real), measure_durations(real)
        error = found.total / real.total - 1
        by_job = ", ".join(_format_job(real, name, value) for name, value in found.achieved.items())
        print(f"  {real.policy:8}{real.total / 1e12:9.3f}{found.total / 1e12:11.3f}{error:+8.1%}   {by_job}")
        print(f"  {'':36}   {_format_durations(measured)}")
        if abs(error) > WITHIN:
            wrong.append(f"seed {seed}: the simulator's error is {error:+.1%} for {real.policy}")
    ours, beside = (real.total for real in runs)
    simulated = predict(runs[0]).total / predict(runs[1]).total
    print(f"  ours is {ours / beside:.3f} times as much, simulated {simulated:.3f}", flush=True)
    others = {policy: predict(runs[0], policy).total / 1e12 for policy in SIMULATED}
    print(f"  simulated only: {', '.join(f'{policy} {total:.3f}' for policy, total in others.items())}", flush=True)
    if ours < beside:
        wrong.append(f"seed {seed}: ours is below shrinking the hit job: {ours / beside:.3f}")
    return wrong


def _format_job(run: RealRun, name: str, simulated: float) -> str:
    job = next(job for job in run.jobs if job.name == name)
    return (
        f"{name} {job.weight * job.flop_per_sample * job.samples_done(run.seconds) / 1e12:.3f}/{simulated / 1e12:.3f}"
    )


def _format_durations(measured: Durations) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in msgspec.structs.asdict(measured).items())


if __name__ == "__main__":
    sys.exit(main())
