"""Three jobs on a pool of eight local nodes with random faults: the section `faults` of benchmarks/pool.py."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from pool_figures import format_spread, median_step

from tests.harness.local_pool import LocalPool

NODES = 8
JOBS = ("first", "second", "experts")
UNSAVED = ("second", "experts")
SCRIPTS = Path(__file__).parents[1] / "tests" / "integration" / "scripts"
TINY, TINY_MOE = SCRIPTS / "tiny.py", SCRIPTS / "tiny_moe.py"
FOREVER = ("--steps", "100000000", "--step-seconds", "0.5")
#: Range of seconds between faults.
APART_S = (4.0, 10.0)
#: Moments of user actions, as shares of the time; see `ask`.
ASKS = (0.25, 0.5, 0.6, 0.75)


def inject_faults(pool: LocalPool, minutes: float, rng: Random) -> list[tuple[float, str, str]]:
    """Inject faults and user actions; return (time, kind, victim) of each fault."""
    saved = ("--checkpoint-dir", str(pool.folder / "saved"))
    pool.submit("first", "1:4", TINY, *FOREVER, options=saved)
    pool.submit("second", "1:4", TINY, *FOREVER)
    # Each node can hold all eight experts. With six slots per node, some experts have one copy on two nodes, and a loss
    # of a node may end the job.
    pool.submit("experts", "2:3", TINY_MOE, *FOREVER, options=("--expert-slots", "8"))
    pool.goes_on(*JOBS)
    faults: list[tuple[float, str, str]] = []
    begin, until = time.time(), time.time() + 60.0 * minutes
    asks = list(ASKS)
    while time.time() < until:
        time.sleep(rng.uniform(*APART_S))
        _wait_for_copies(pool)
        struck = kill_random(pool, rng)
        faults += [struck] if struck is not None else []
        if asks and (time.time() - begin) / (until - begin) > asks[0]:
            act_as_user(pool, asks.pop(0))
    for share in asks:  # those skipped on a slow machine; without them, a suspended job would never continue
        act_as_user(pool, share)
    pool.goes_on(*JOBS, steps=5)
    return faults


def _wait_for_copies(pool: LocalPool) -> None:
    """Wait until jobs without checkpoints train on two nodes each: losing both at once would lose all state."""

    def members(name: str) -> int:
        begun = pool.events_of(name, "generation_started")
        return len(begun[-1]["members"]) if begun else 0

    for name in UNSAVED:
        pool.wait(lambda name=name: members(name) >= 2, f"another node of {name}")
    pool.goes_on(*UNSAVED, steps=2)


def kill_random(pool: LocalPool, rng: Random) -> tuple[float, str, str] | None:
    """Kill a random victim; return (time, kind, victim), or None if it is not running now."""
    what = rng.choice(("node", "node", "worker", "server"))
    if what == "server":
        whom, pids = "server", [pid for pid, line in pool.processes() if "local_pool server" in line]
    else:
        whom = f"node-{rng.randrange(pool.nodes)}"
        mark = f"local_pool {whom}" if what == "node" else f"agent:{whom}"
        pids = [pid for pid, line in pool.processes() if mark in line]
    at = time.time()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return (at, what if what != "worker" else "job's agent", whom) if pids else None


def act_as_user(pool: LocalPool, share: float) -> None:
    """Perform the user action of this share of the time."""
    pool.until_answered()  # the server may have been killed just now
    if share == 0.25:
        # This job often has only one node. Without checkpoints, losing that node would end it.
        pool.submit("fourth", "1:2", TINY, *FOREVER, options=("--checkpoint-dir", str(pool.folder / "fourth")))
    elif share == 0.5:
        pool.call("suspend", "-j", "first")
    elif share == 0.6:
        pool.call("resume", "-j", "first")
    else:
        pool.call("stop", "-j", "fourth")


# ---- the result ----


def print_results(pool: LocalPool, faults: Sequence[tuple[float, str, str]]) -> None:
    """Print the results."""
    kinds = sorted({what for _, what, _ in faults})
    print("killed: " + ", ".join(f"{sum(what == kind for _, what, _ in faults)} x {kind}" for kind in kinds))
    print(f"servers: {len(pool.events('pool_started'))}; grants: {len(pool.events('node_granted'))}")
    print(f"{'job':10}{'steps':>7}{'generations':>13}{'down less a step, s':>36}")
    for name in JOBS:
        events = pool.events_of(name)
        steps = [event for event in events if event["event"] == "step_committed"]
        downs = [event["down_s"] for event in events if event["event"] == "recovered"]
        usual = median_step(events)
        generations = sum(event["event"] == "generation_started" for event in events)
        print(f"{name:10}{len(steps):7}{generations:13}{format_spread([down - usual for down in downs]):>36}")
    print()
    print(f"a node killed: to its next grant, s                {format_spread(node_return_times(pool, faults))}")
    print(f"the server killed: to the start of the next one, s {format_spread(server_return_times(pool, faults))}")


def node_return_times(pool: LocalPool, faults: Sequence[tuple[float, str, str]]) -> list[float]:
    """Return the seconds from each node agent's death until the node was granted again."""
    grants = pool.events("node_granted")
    found = [
        min((event["time"] - at for event in grants if event["node"] == whom and event["time"] > at), default=None)
        for at, what, whom in faults
        if what == "node"
    ]
    return [seconds for seconds in found if seconds is not None]


def server_return_times(pool: LocalPool, faults: Sequence[tuple[float, str, str]]) -> list[float]:
    """Return the seconds from each server's death until the next one started."""
    starts = [event["time"] for event in pool.events("pool_started")]
    found = [
        min((start - at for start in starts if start > at), default=None) for at, what, _ in faults if what == "server"
    ]
    return [seconds for seconds in found if seconds is not None]
