"""Measure moves, losses and outages of several jobs on a pool of local nodes, and check that nothing is lost.

    make bench-pool                                       everything
    python benchmarks/pool.py --only moves --rounds 3     one section

  faults   Eight nodes, two dense jobs and one with experts, for --minutes: agents of nodes and jobs and the server are
           killed at random, a fourth job is submitted and stopped, the first job is suspended and resumed.
  moves    Six nodes: jobs are submitted and end, so that a healthy job gives up two nodes and gets two. Measures its
           delay, and the delay of another job that keeps its nodes.
  hit      Four nodes, one job: a node is killed. Measures the downtime and the time until the last node is in place,
           and the same without a pool.
  reserve  Four nodes, one of them the reserve, one job: a node is killed and the warm reserve replaces it. Measures the
           downtime, and the same without a pool but with a standby.
  servers  The server is killed --servers times, every second time during a move. Compares the nodes of each job.
  etcd     The store, an etcd started by this benchmark, is unavailable for --away seconds.

Delay: the longest step around a change, less the median step before or after it, whichever is longer. Down: as in the
event `recovered`, less the median step. All figures come from the journals. In each section the samples of every job
are audited, the pool's journal is checked for nodes with two owners, and no process may be left.
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
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from random import Random

import pool_faults
from ending import end_in_order
from pool_figures import Events, Figures, find_world_regained, measure_delays, median_step

from holdfast.protocol.events import GenerationStarted, NodesJoined, Recovered, StandbyReady, StepCommitted
from tests.harness.local_etcd import LocalEtcd, NoEtcdError
from tests.harness.local_job import LocalJob
from tests.harness.local_pool import LocalPool

SCRIPTS = Path(__file__).parents[1] / "tests" / "integration" / "scripts"
TINY = SCRIPTS / "tiny.py"
#: A step on four nodes takes 0.1 s.
ARGS = ("--steps", "100000000", "--step-seconds", "0.4")
SETTLE_STEPS = 10
MAX_MORE_S = 0.02
MAX_IN_PLACE_S = 5.0
MAX_MORE_WITH_RESERVE_S = 0.1
#: Share of the possible steps that must be trained without the store.
MIN_SHARE = 0.8
#: Seconds after the return of the store within which all these steps must be reported.
TOLD_S = 5.0


def main() -> int:
    """Run the sections and print their tables; return 1 if one of them failed."""
    options = _options()
    end_in_order()
    wrong: list[str] = []
    for name in options.only or SECTIONS:
        print(f"== {name}", flush=True)
        began = time.monotonic()
        wrong += [f"{name}: {what}" for what in SECTIONS[name](options)]
        print(f"   ({time.monotonic() - began:.0f} s)\n", flush=True)
    print("wrong: " + ("; ".join(wrong) if wrong else "nothing"))
    return 1 if wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", choices=list(SECTIONS), help="run only this section; may be repeated"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of faults (default: 10)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of moves, hits and reserve (default: 20)")
    parser.add_argument("--servers", type=int, default=20, help="number of servers to kill (default: 20)")
    parser.add_argument("--away", type=float, default=60.0, help="seconds without the store (default: 60)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


@contextlib.contextmanager
def running_pool(nodes: int, *options: str, store: str = "") -> Generator[LocalPool]:
    """Run a pool, and end all its processes afterwards."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        pool = LocalPool(Path(folder), nodes, *options, store=store)
        try:
            yield pool
        finally:
            if pool.process.poll() is None:
                pool.process.kill()
            for pid, _ in pool.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def end_pool(pool: LocalPool, *names: str) -> list[str]:
    """Stop these jobs and the pool; return errors in their journals."""
    wrong: list[str] = []
    for name in names:
        pool.call("stop", "-j", name)
    for name in names:
        try:
            pool.check_journal_of(name)
        except AssertionError as error:
            wrong.append(f"job {name}: {str(error)[:500]}")
    pool.check_owners()
    pool.end()
    if not wrong:
        print("every step of every job once, with all its samples; no node ever owned by two jobs; no process left")
    return wrong


# ---- sections ----


def run_faults(options: argparse.Namespace) -> list[str]:
    """Inject all kinds of faults for some minutes."""
    with running_pool(pool_faults.NODES) as pool:
        found = pool_faults.inject_faults(pool, options.minutes, Random(options.seed))
        wrong = end_pool(pool, *pool_faults.JOBS)
        pool_faults.print_results(pool, found)
        return wrong


def run_moves(options: argparse.Namespace) -> list[str]:
    """Submit and stop jobs, so that healthy jobs give up nodes and get nodes."""
    with running_pool(6) as pool:
        pool.submit("steady", "2:2", TINY, *ARGS)
        pool.submit("first", "1:4", TINY, *ARGS)
        pool.wait(pool.has("first", 4), "its nodes")
        pool.goes_on("first", "steady", steps=2 * SETTLE_STEPS)
        since = time.time()
        for number in range(options.rounds):
            pool.submit(f"guest-{number}", "2:2", TINY, *ARGS)
            pool.wait(pool.has(f"guest-{number}", 2), "two nodes of the first")
            pool.goes_on("first", f"guest-{number}", steps=SETTLE_STEPS)
            pool.call("stop", "-j", f"guest-{number}")
            pool.wait(pool.has("first", 4), "its nodes again")
            pool.goes_on("first", steps=SETTLE_STEPS)
        leaves, joins = measure_delays(pool.events_of("first"), since)
        beside = measure_delays(pool.events_of("first"), since, steps_of=pool.events_of("steady"))
        redone = [
            event["micro_batches_redone"]
            for name in ("first", "steady")
            for event in pool.events_of(name, "recovered")
            if event["time"] > since and event.get("micro_batches_redone")
        ]
        wrong = end_pool(pool, "first", "steady")
    join, leave = Figures("a node joins (delay, s)", joins), Figures("a node leaves (delay, s)", leaves)
    other = Figures("another job that keeps its nodes (delay, s)", [*beside[0], *beside[1]])
    for figures in (join, leave, other):
        print(figures)
    print(f"micro-batches computed again: {sum(redone)}")
    wrong += [
        f"{one.what}: {one.median:.3f} s, a join {join.median:.3f} s"
        for one in (leave, other)
        if one.median > join.median + MAX_MORE_S
    ]
    return [*wrong, f"{sum(redone)} micro-batches redone"] if redone else wrong


def run_hit(options: argparse.Namespace) -> list[str]:
    """Kill a node, in a pool and without one."""
    rng = Random(options.seed)
    with running_pool(4) as pool:
        pool.submit("one", "1:4", TINY, *ARGS)
        pool.wait(pool.has("one", 4), "its nodes")
        killed: list[float] = []
        for _ in range(options.rounds):
            pool.goes_on("one", steps=SETTLE_STEPS)
            killed.append(time.time())
            os.kill(pool.pid_of(f"node-{rng.randrange(4)}"), signal.SIGKILL)
            pool.wait(lambda: find_world_regained(pool.events_of("one"), killed[-1], 4) is not None, "all four nodes")
        pool.goes_on("one")
        events = pool.events_of("one")
        downs = [event["down_s"] for event in events if event["event"] == "recovered" and event["action"] == "shrink"]
        usual = median_step(events)
        places = [found - at for at in killed if (found := find_world_regained(events, at, 4)) is not None]
        wrong = end_pool(pool, "one")
    pooled = Figures("down less a step, in a pool (s)", [down - usual for down in downs])
    alone = Figures("down less a step, without a pool (s)", _hit_alone(rng, options.rounds))
    place = Figures("killed, to its last node in place (s)", places)
    for figures in (pooled, alone, place):
        print(figures)
    if place.median > MAX_IN_PLACE_S:
        wrong.append(f"the last node is in place after {place.median:.1f} s")
    if pooled.median > alone.median + MAX_MORE_S:
        wrong.append(f"a job is down for {pooled.median:.3f} s in a pool, {alone.median:.3f} s without one")
    return wrong


def _hit_alone(rng: Random, rounds: int) -> list[float]:
    """Kill nodes of a job without a pool; return its downtimes."""
    with LocalJob(TINY, ARGS, options=("--nodes", "1:4")) as job:
        job.wait(GenerationStarted, world_size=4)
        for _ in range(rounds):
            since = len(job.events)
            job.wait(StepCommitted, since=since, step=len(job.all(StepCommitted)) + SETTLE_STEPS)
            since = len(job.events)
            job.signal_node(rng.choice(job.nodes()))
            job.wait(Recovered, since=since, action="shrink")
            job.add_nodes(1)
            job.wait(NodesJoined, since=since)
            job.wait(GenerationStarted, since=since, world_size=4)
        steps = sorted(event.step_s for event in job.all(StepCommitted))
        return [event.down_s - steps[len(steps) // 2] for event in job.all(Recovered) if event.action == "shrink"]


def run_reserve(options: argparse.Namespace) -> list[str]:
    """Kill a node that has a warm replacement, in a pool and without one."""
    rng = Random(options.seed)
    with running_pool(4, "--reserve", "1") as pool:
        pool.submit("one", "2:4", TINY, *ARGS)
        pool.wait(pool.has("one", 3), "three nodes")
        killed, kills = 0.0, list[float]()
        for number in range(options.rounds):
            pool.wait(lambda: _has_warm_standby(pool, "one", killed), "a warm node of the reserve")  # noqa: B023
            pool.goes_on("one", steps=SETTLE_STEPS)
            killed = time.time()
            kills.append(killed)
            os.kill(pool.pid_of(rng.choice(pool.job("one")["nodes"])), signal.SIGKILL)
            pool.wait(lambda: len(_replacements(pool.events_of("one"))) == number + 1, "a recovery")  # noqa: B023
        pool.goes_on("one")
        events = pool.events_of("one")
        pooled = [event["down_s"] - median_step(events) for event in _replacements(events)]
        steps = [event for event in events if event["event"] == "step_committed" and event["time"] > kills[0]]
        smaller = [event["time"] for event in steps if event["world_size"] != 3]
        wrong = end_pool(pool, "one")
    reserved = Figures("down less a step, with the reserve (s)", pooled)
    alone = Figures("down less a step, with a standby (s)", _hit_with_a_standby(rng, options.rounds))
    print(reserved, alone, sep="\n")
    after = [f"{when - max(kill for kill in kills if kill < when):.2f} s" for when in smaller]
    wrong += [f"steps with fewer or more than three nodes, after a kill: {', '.join(after)}"] if after else []
    if reserved.median > alone.median + MAX_MORE_WITH_RESERVE_S:
        wrong.append(f"a job is down for {reserved.median:.3f} s with the reserve, {alone.median:.3f} s with a standby")
    return wrong


def _replacements(events: Events) -> Events:
    return [event for event in events if event["event"] == "recovered" and event["action"] == "replace"]


def _has_warm_standby(pool: LocalPool, name: str, killed: float) -> bool:
    """Return whether a job has three nodes and a warm standby that was granted after the last kill."""
    granted = [event for event in pool.events("node_granted") if event["standby"] and event["time"] > killed]
    ready = {event["node"]: event["time"] for event in pool.events_of(name, "standby_ready")}
    warm = any(ready.get(event["node"], 0.0) > event["time"] for event in granted)
    return warm and len(pool.job(name)["nodes"]) == 3


def _hit_with_a_standby(rng: Random, rounds: int) -> list[float]:
    """Kill nodes of a job without a pool, with a new standby each time; return its downtimes."""
    agents: list[subprocess.Popen[bytes]] = []
    with LocalJob(TINY, ARGS, options=("--nodes", "3")) as job:
        job.wait(GenerationStarted, world_size=3)
        try:
            for number in range(rounds):
                command = [sys.executable, "-m", "holdfast", "agent", "--standby", "--node-name", f"standby-{number}"]
                command += ["--address", job.url, str(TINY), *ARGS]
                quiet = subprocess.DEVNULL
                agents.append(subprocess.Popen(command, env=job.environment, stdout=quiet, stderr=quiet))
                job.wait(StandbyReady, node=f"standby-{number}")
                job.wait(StepCommitted, step=len(job.all(StepCommitted)) + SETTLE_STEPS)
                since = len(job.events)
                job.signal_node(rng.choice(job.nodes()))
                job.wait(Recovered, since=since, action="replace")
            steps = sorted(event.step_s for event in job.all(StepCommitted))
            return [event.down_s - steps[len(steps) // 2] for event in job.all(Recovered) if event.action == "replace"]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()


def run_servers(options: argparse.Namespace) -> list[str]:
    """Kill the server, every second time during a move."""
    rng, wrong = Random(options.seed), list[str]()
    with running_pool(6) as pool:
        for name in ("first", "second"):
            pool.submit(name, "1:4", TINY, *ARGS)
        for name in ("first", "second"):
            pool.wait(pool.has(name, 3), "three nodes")
        for number in range(options.servers):
            pool.goes_on("first", "second")
            before = {name: pool.job(name)["nodes"] for name in ("first", "second")}
            if number % 2:
                pool.submit(f"guest-{number}", "2:2", TINY, *ARGS)
                time.sleep(rng.uniform(0.0, 0.5))
            os.kill(pool.pid_of("server"), signal.SIGKILL)
            pool.wait(lambda: len(pool.events("pool_started")) == number + 2, "another server")  # noqa: B023
            if number % 2:
                pool.wait(pool.has(f"guest-{number}", 2), "the guest's nodes")
                pool.wait(pool.has("first", 2), "two nodes of the first job")
                pool.goes_on(f"guest-{number}")
                pool.call("stop", "-j", f"guest-{number}")
                for name in ("first", "second"):
                    pool.wait(pool.has(name, 3), "three nodes again")
            else:
                pool.goes_on("first", "second")
                after = {name: pool.job(name)["nodes"] for name in ("first", "second")}
                wrong += [f"after server {number + 2}: {before} became {after}"] if after != before else []
        pool.goes_on("first", "second")
        seen = [(name, event) for name in ("first", "second") for event in pool.events_of(name, "failure_detected")]
        wrong += [
            f"job {name} has seen a failure of {one['node']}: {one['kind']}, {one['detail']}" for name, one in seen
        ]
        wrong += end_pool(pool, "first", "second")
        print(f"{options.servers} servers killed; grants: {len(pool.events('node_granted'))}")
    return wrong


def run_etcd(options: argparse.Namespace) -> list[str]:
    """Stop the store: no decision may be made, training must continue, and users must be informed."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-etcd-") as folder:
        try:
            store = LocalEtcd(Path(folder) / "data")
        except NoEtcdError as missing:
            print(f"skipped: {missing}")
            return []
        try:
            with running_pool(4, store=store.url) as pool:
                for name in ("first", "second"):
                    pool.submit(name, "1:4", TINY, *ARGS)
                for name in ("first", "second"):
                    pool.wait(pool.has(name, 2), "two nodes")
                pool.goes_on("first", "second")
                before = {name: pool.events_of(name, "step_committed") for name in ("first", "second")}
                began = time.time()
                store.kill()
                wrong += _check_without_store(pool, options.away)
                store.start()
                pool.goes_on("first", "second")
                wrong += _check_trained_steps(pool, before, time.time() - began)
                pool.submit("third", "1:1", TINY, *ARGS)
                pool.wait(pool.has("third", 1), "its node")
                pool.goes_on("first", "second", "third")
                wrong += end_pool(pool, "first", "second", "third")
                said = [line for line in pool.log.read_text().splitlines() if "the store answers again" in line]
                print(f"  {said[0]}" if said else "  no log line reports that the store answers again")
                wrong += [] if said else ["the return of the store was not logged"]
        finally:
            store.kill()
    return wrong


def _check_without_store(pool: LocalPool, away_s: float) -> list[str]:
    """Check the answers to users and the absence of decisions while the store is unavailable."""
    wrong: list[str] = []
    events = len(pool.events())
    until = time.monotonic() + away_s
    for number in (1, 2):  # the first request detects the outage
        try:
            said = pool.call("update", "-j", "first", "--weight", "2", code=4).strip()
        except AssertionError as error:
            said = str(error)
        print(f"  answer to user {number}: {said.splitlines()[-1][:240]}")
        if "training goes on" not in said:
            wrong.append(f"user {number} got the answer {said!r}")
    while time.monotonic() < until:
        time.sleep(min(1.0, max(0.0, until - time.monotonic())))
    if len(pool.events()) != events:
        wrong.append(f"decided without the store: {pool.events()[events:]}")
    return wrong


def _check_trained_steps(pool: LocalPool, before: Mapping[str, Events], elapsed_s: float) -> list[str]:
    """Check the steps trained during the outage: coordinators report them once the store is back."""
    wrong: list[str] = []
    for name, steps in before.items():  # steps reported later have no individual durations
        usual, until = median_step(steps), time.monotonic() + TOLD_S
        while (done := len(pool.steps(name)) - len(steps)) < elapsed_s / usual and time.monotonic() < until:
            time.sleep(0.1)
        print(f"  job {name}: {done} steps in {elapsed_s:.1f} s; {elapsed_s / usual:.0f} at {usual:.3f} s each")
        if done < MIN_SHARE * elapsed_s / usual:
            wrong.append(f"job {name} has done {done} steps of {elapsed_s / usual:.0f}")
    return wrong


SECTIONS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "faults": run_faults,
    "moves": run_moves,
    "hit": run_hit,
    "reserve": run_reserve,
    "servers": run_servers,
    "etcd": run_etcd,
}

if __name__ == "__main__":
    sys.exit(main())
