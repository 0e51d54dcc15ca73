"""What three jobs on eight nodes achieve while nodes fail and come back: the pool's plan against shrinking the hit job.

    make bench-waf
    python benchmarks/pool_waf.py --seeds 1 --seconds 90

Both are really run, on the same seeded trace: `waf` shares the nodes out by what jobs have measured. With `sized` each
job has what that plan gave it at the begin, only the one that is hit has fewer, and a node that is back goes to whoever
came first of those that have fewer (Unicron, section 7.5, but for the order of those hit). Each micro-batch takes a
stated time (`--emulate-compute`), so that a smaller world shows on two cores; the jobs differ in weight and in how many
micro-batches a step has, by which they grow better or worse.

WAF = weight x FLOP of the samples that a job has committed, of all jobs, over the time (TFLOP below: a sample is said
to take `FLOP`). All figures come from the jobs' own event files.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ending import end_in_order
from pool_faults import TINY
from pool_figures import spread
from standstill import Watch

from holdfast.testing.local_pool import LocalPool

NODES = 8
FLOP = 1e9
#: name, weight, samples of a step, seconds of a micro-batch of 4 samples
JOBS = (("heavy", 2.0, 48, 0.3), ("long", 1.0, 64, 0.2), ("short", 1.0, 8, 0.4))
#: a node fails so often, and is away so long, in seconds
FAILS_S, AWAY_S = 60.0, (15.0, 40.0)


@dataclass(frozen=True)
class Outage:
    """A node that is killed `at` so many seconds, and started again `back`."""

    node: int
    at: float
    back: float


def trace(seed: int, seconds: float) -> list[Outage]:
    """Return what happens: each node but the pool's own fails as often as any other; never more than half at once."""
    rng = Random(seed)
    found: list[Outage] = []
    at = rng.expovariate(NODES / FAILS_S)
    while at < seconds:
        away = {one.node for one in found if one.back > at}
        here = [node for node in range(1, NODES) if node not in away]
        if len(here) > NODES // 2:
            found.append(Outage(rng.choice(here), at, at + rng.uniform(*AWAY_S)))
        at += rng.expovariate(NODES / FAILS_S)
    return found


class Nodes:
    """The nodes' agents, killed and started as the trace has it."""

    def __init__(self, pool: LocalPool) -> None:
        self._pool = pool
        self._agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        """Start a node's agent."""
        command = [sys.executable, "-m", "holdfast", "agent", "--node-name", f"m{node}"]
        with self._pool.log.open("ab") as log:
            self._agents[node] = subprocess.Popen(
                command, env=self._pool.environment, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )

    def kill(self, node: int) -> None:
        """Kill a node's agent; whatever it has started dies with it."""
        self._agents[node].kill()
        self._agents[node].wait()

    def end(self) -> None:
        """End all."""
        for agent in self._agents.values():
            agent.send_signal(signal.SIGINT)
        for agent in self._agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(timeout=30)


def main() -> int:
    """Run the benchmark and print its table."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0)
    given = parser.parse_args()
    ratios: list[float] = []
    with Watch() as watch:
        for seed in range(1, given.seeds + 1):
            outages = trace(seed, given.seconds)
            ours, sizes = run("waf", outages, given.seconds, {})
            hit_only, _ = run("sized", outages, given.seconds, sizes)
            waf = {"waf": ours, "sized": hit_only}
            print(f"  at the begin: {', '.join(f'{name} {nodes}' for name, nodes in sizes.items())}")
            ratios.append(waf["waf"] / waf["sized"])
            told = ", ".join(f"{policy} {done / 1e12:.3f} TFLOP" for policy, done in waf.items())
            print(f"seed {seed}: {len(outages)} nodes lost; {told}: {ratios[-1]:.3f} times as much", flush=True)
    print(f"ours against shrinking the hit job: {spread(ratios)}; wanted: never below 1")
    print(watch)
    return int(min(ratios) < 1.0)


def run(policy: str, outages: list[Outage], seconds: float, asks: dict[str, int]) -> tuple[float, dict[str, int]]:
    """Return the weighted FLOP that all jobs have done in so many seconds, and how many nodes they had at the begin.

    Args:
        asks: nodes of each at the most, all where it is not in it.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        Path(folder).chmod(0o700)
        pool = LocalPool(Path(folder), 1, "--policy", policy, "--reserve", "0")
        nodes = Nodes(pool)
        try:
            # (the pool's own node is one of the eight, and never fails)
            for node in range(1, NODES):
                nodes.start(node)
            pool.wait(lambda: len(pool.events("node_added")) == NODES, "its nodes")
            for name, weight, batch, micro_batch_s in JOBS:
                submit(pool, name, weight, batch, micro_batch_s, asks.get(name, NODES))
            for _ in range(2):  # (first they are measured; the plan that follows from it is measured again)
                pool.goes_on(*(job[0] for job in JOBS), steps=12)
            sizes = {name: len(pool.job(name)["nodes"]) for name, *_ in JOBS}
            begun = time.time()
            play(nodes, outages, begun, seconds)
            return sum(done(pool, name, begun, begun + seconds) * weight for name, weight, *_ in JOBS), sizes
        finally:
            nodes.end()
            pool.process.send_signal(signal.SIGINT)
            pool.process.wait()
            for pid, _ in pool.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def submit(pool: LocalPool, name: str, weight: float, batch: int, micro_batch_s: float, most: int) -> None:
    """Hand in a job."""
    options = (
        *("--set", f"weight={weight}", "--flop-per-sample", str(FLOP)),
        *("--emulate-compute", f"{micro_batch_s}/micro-batch"),
    )
    pool.submit(name, f"1:{most}", TINY, "--steps", "100000000", "--global-batch", str(batch), options=options)


def play(nodes: Nodes, outages: list[Outage], begun: float, seconds: float) -> None:
    """Have everything happen in its time."""
    for at, node, back in _in_order(outages):
        if at >= seconds:
            break
        time.sleep(max(0.0, begun + at - time.time()))
        if back:
            nodes.start(node)
        else:
            nodes.kill(node)
    time.sleep(max(0.0, begun + seconds - time.time()))


def _in_order(outages: list[Outage]) -> Iterator[tuple[float, int, bool]]:
    yield from sorted([(one.at, one.node, False) for one in outages] + [(one.back, one.node, True) for one in outages])


def done(pool: LocalPool, name: str, since: float, until: float) -> float:
    """Return the FLOP of the samples that a job has committed in this time."""
    steps = (event for event in pool.events_of(name, "step_committed") if since <= event["time"] < until)
    return sum(event["samples"] for event in steps) * FLOP


if __name__ == "__main__":
    sys.exit(main())
