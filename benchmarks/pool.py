"""Three jobs on a pool of eight local nodes, and all that goes wrong: what it costs them, and that nothing is lost.

Two dense jobs and one with experts; agents of nodes, workers and the server are killed at random moments, a fourth job
comes and is stopped, the first is suspended and goes on. At the end each job's samples are audited, the pool's journal
says whether a node ever had two owners, and no process may be left. What is printed is measured from the journals.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from holdfast.testing.local_pool import LocalPool

NODES = 8
SCRIPTS = Path(__file__).parents[1] / "tests" / "integration" / "scripts"
TINY, TINY_MOE = SCRIPTS / "tiny.py", SCRIPTS / "tiny_moe.py"
FOREVER = ("--steps", "100000000", "--step-seconds", "0.5")
#: faults come about so often, in seconds
APART_S = (4.0, 10.0)


def main() -> None:
    """Run it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        pool = LocalPool(Path(folder), NODES)
        try:
            faults = run(pool, options.minutes, Random(options.seed))
            show(pool, faults)
        finally:
            if pool.process.poll() is None:
                pool.process.kill()
            for pid, _ in pool.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def run(pool: LocalPool, minutes: float, rng: Random) -> list[tuple[float, str, str]]:
    """Let everything happen, then end the jobs; return (time, what, whom) of each fault."""
    saved = ("--checkpoint-dir", str(pool.folder / "saved"))
    pool.submit("first", "1:4", TINY, *FOREVER, options=saved)
    pool.submit("second", "1:4", TINY, *FOREVER)
    pool.submit("experts", "2:3", TINY_MOE, *FOREVER)
    pool.goes_on("first", "second", "experts")
    faults: list[tuple[float, str, str]] = []
    begin, until = time.time(), time.time() + 60.0 * minutes
    asked = iter((0.25, 0.5, 0.6, 0.75, 2.0))
    due = next(asked)
    while time.time() < until:
        time.sleep(rng.uniform(*APART_S))
        pool.goes_on("experts", steps=2)  # (two nodes lost at once are more than f = 2 allows)
        faults.append((time.time(), *strike(pool, rng)))
        if (time.time() - begin) / (until - begin) > due:
            ask(pool, due)
            due = next(asked)
    pool.goes_on("first", "second", "experts", steps=5)
    for name in ("first", "second", "experts"):
        pool.call("stop", "-j", name)
        pool.check_journal_of(name)
    pool.check_owners()
    pool.end()
    return faults


def strike(pool: LocalPool, rng: Random) -> tuple[str, str]:
    """Kill somebody; return what and whom."""
    what = rng.choice(("node", "node", "worker", "server"))
    if what == "server":
        whom, pids = "server", [pid for pid, line in pool.processes() if "local_pool server" in line]
    else:
        whom = f"node-{rng.randrange(pool.nodes)}"
        mark = f"local_pool {whom}" if what == "node" else f"agent:{whom}"
        pids = [pid for pid, line in pool.processes() if mark in line]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return (what if what != "worker" else "job's agent"), whom


def ask(pool: LocalPool, share: float) -> None:
    """Do what users do, at this share of the time."""
    if share == 0.25:
        pool.submit("fourth", "1:2", TINY, *FOREVER)
    elif share == 0.5:
        pool.call("suspend", "-j", "first")
    elif share == 0.6:
        pool.call("resume", "-j", "first")
    else:
        pool.call("stop", "-j", "fourth")


# ---- what is told ----


def show(pool: LocalPool, faults: Sequence[tuple[float, str, str]]) -> None:
    """Print what it came to."""
    kinds = sorted({what for _, what, _ in faults})
    print("killed: " + ", ".join(f"{sum(what == kind for _, what, _ in faults)} x {kind}" for kind in kinds))
    print(f"servers: {len(pool.events('pool_started'))}; grants: {len(pool.events('node_granted'))}")
    print("every step of every job once, with all its samples; no node ever of two jobs; no process left")
    print()
    print(f"{'job':10}{'steps':>7}{'generations':>13}{'down less a step, s':>36}")
    for name in ("first", "second", "experts"):
        events = journal_of(pool, name)
        steps = [event for event in events if event["event"] == "step_committed"]
        downs = [event["down_s"] for event in events if event["event"] == "recovered"]
        usual = statistics.median(event["step_s"] for event in steps)
        generations = sum(event["event"] == "generation_started" for event in events)
        print(f"{name:10}{len(steps):7}{generations:13}{spread([down - usual for down in downs]):>36}")
    print()
    print(f"a node killed: to its next grant, s                {spread(back_after(pool, faults))}")
    print(f"the server killed: to the next one's first word, s {spread(server_back_after(pool, faults))}")


def journal_of(pool: LocalPool, name: str) -> list[dict[str, Any]]:
    """Return a job's events."""
    (path,) = pool.journals.glob(f"{name}.*.events.jsonl")
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def back_after(pool: LocalPool, faults: Sequence[tuple[float, str, str]]) -> list[float]:
    """Return how long after its agent's death each node was granted anew."""
    grants = pool.events("node_granted")
    found = [
        min((event["time"] - at for event in grants if event["node"] == whom and event["time"] > at), default=None)
        for at, what, whom in faults
        if what == "node"
    ]
    return [seconds for seconds in found if seconds is not None]


def server_back_after(pool: LocalPool, faults: Sequence[tuple[float, str, str]]) -> list[float]:
    """Return how long after a server's death the next one began."""
    starts = [event["time"] for event in pool.events("pool_started")]
    found = [
        min((start - at for start in starts if start > at), default=None) for at, what, _ in faults if what == "server"
    ]
    return [seconds for seconds in found if seconds is not None]


def spread(values: Sequence[float]) -> str:
    """Return median, range and number."""
    if not values:
        return "none"
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f}; {len(values)})"


if __name__ == "__main__":
    main()
