"""Check that training survives an outage of the coordinator, and that a paused process does no harm when it resumes.

    make bench-outage

The coordinator is killed and restarted after 10 s: no step may take twice the median, and no event may be missing. A
node is stopped (SIGSTOP), expelled and continued: nothing that it does in its old generation may count. The coordinator
is stopped and continued: no node may be expelled because of its absence.
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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from holdfast.protocol.events import (
    CoordinatorRestarted,
    FailureDetected,
    GenerationStarted,
    JobStarted,
    NodeLeft,
    NodesJoined,
    Recovered,
    RolledBack,
    StepCommitted,
)
from tests.harness.local_job import EventLog

ROOT = Path(__file__).resolve().parent.parent
DENSE = ROOT / "examples" / "dense_gpt.py"
ARGS = ("--steps", "1000000", "--layers", "6", "--dim", "256", "--heads", "4", "--context", "16")
AWAY_S = 10.0


def main() -> int:
    """Run the three scenarios; return 1 if one of them failed."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    wrong: list[str] = []
    with ManualJob(DENSE, ARGS, nodes=4) as job:
        job.wait(StepCommitted, step=20)
        kill_coordinator(job, wrong)
        pause_node(job, wrong)
        pause_coordinator(job, wrong)
        steps = [e.step for e in job.all(StepCommitted)]
        if steps != list(range(1, len(steps) + 1)):
            wrong.append("steps are missing or doubled in the journal")
        if [e.seq for e in job.events] != list(range(1, len(job.events) + 1)):
            wrong.append("events are missing or doubled in the journal")
    print("wrong: " + ("; ".join(wrong) if wrong else "nothing"))
    return 1 if wrong else 0


class ManualJob(EventLog):
    """A coordinator and agents started separately, so that the coordinator can stay away for a while."""

    def __init__(self, script: Path, args: Sequence[str], *, nodes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-")
        folder = Path(self._folder.name)
        super().__init__(folder / "events.jsonl", alive=lambda: True)
        self._log = (folder / "output.txt").open("wb")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOLDFAST_TOKEN": secrets.token_hex(16)}
        store = f"sqlite:{folder / 'store.db'}"
        self._coordinator_command = ("coordinator", "--listen", f"127.0.0.1:{port}", "--store", store)
        self._coordinator_command += ("--events", str(folder / "events.jsonl"), "--nodes", str(nodes))
        url = f"http://127.0.0.1:{port}"
        self._agent_commands = [
            ("agent", "--address", url, "--node-name", f"n{number}", str(script), *args) for number in range(nodes)
        ]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.start_coordinator()
        self.follow()
        self.wait(JobStarted)
        for command in self._agent_commands:
            self._spawn(command)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            process.wait(20)
        self.unfollow()
        self._log.close()
        self._folder.cleanup()

    def start_coordinator(self) -> None:
        """Start a coordinator on the same port and store as before."""
        self._spawn(self._coordinator_command)

    def _spawn(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "holdfast", *arguments]
        self._processes.append(
            subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=self._environment)
        )


def kill_coordinator(job: ManualJob, wrong: list[str]) -> None:
    """Kill the coordinator with SIGKILL, and start its successor 10 s later."""
    before = [e.step_s for e in job.all(StepCommitted)[3:]]
    median = statistics.median(before)
    since = len(job.events)
    at = time.time()
    os.kill(job.wait(JobStarted).coordinator_pid, signal.SIGKILL)
    time.sleep(AWAY_S)
    job.start_coordinator()
    back = job.wait(CoordinatorRestarted, since=since, timeout=60)
    job.wait(StepCommitted, lambda e: e.time > back.time + 1, since=since)
    away = [e for e in job.all(StepCommitted) if at <= e.time <= back.time]
    slowest = max(e.step_s for e in away)
    print(
        f"coordinator away for {back.time - at:.1f} s: {len(away)} steps meanwhile, slowest {slowest * 1e3:.0f} ms, "
        f"median before {median * 1e3:.0f} ms ({slowest / median:.2f}x)"
    )
    if slowest > 2 * median:
        wrong.append(f"a step took {slowest / median:.2f}x the median while the coordinator was away")
    if any(isinstance(e, FailureDetected | GenerationStarted) for e in job.events[since:]):
        wrong.append("the coordinator's outage disturbed the job")


def pause_node(job: ManualJob, wrong: list[str]) -> None:
    """Stop a node with SIGSTOP until it is expelled, and continue it."""
    since = len(job.events)
    victim = job.nodes()[-1]
    at = job.signal_node(victim, signal.SIGSTOP)
    failure = job.wait(FailureDetected, node=victim, since=since)
    recovered = job.wait(Recovered, since=since)
    woken = len(job.events)
    job.signal_node(victim, signal.SIGCONT)
    back = job.wait(NodesJoined, lambda e: victim in e.names, since=woken)
    generation = job.wait(GenerationStarted, lambda e: victim in e.members, since=woken)
    print(
        f"node paused: expelled after {failure.time - at:.1f} s ({failure.kind}), "
        f"down {recovered.down_s:.2f} s; "
        f"after SIGCONT it joined again as a new node after {generation.time - back.time:.2f} s"
    )
    if any(isinstance(e, RolledBack) for e in job.events[since:]):
        wrong.append("a paused node rolled the job back")


def pause_coordinator(job: ManualJob, wrong: list[str]) -> None:
    """Stop the coordinator with SIGSTOP for longer than a lease, and continue it."""
    since = len(job.events)
    pid = [e for e in job.events if isinstance(e, JobStarted | CoordinatorRestarted)][-1].coordinator_pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(pid, signal.SIGCONT)
    at = time.time()
    job.wait(StepCommitted, lambda e: e.time > at + 2, since=since)
    harmed = [
        type(e).__name__ for e in job.events[since:] if isinstance(e, FailureDetected | GenerationStarted | NodeLeft)
    ]
    print(f"coordinator paused for 5 s: {harmed or 'no node expelled'}")
    wrong += [f"{event} after the coordinator's pause" for event in harmed]


if __name__ == "__main__":
    sys.exit(main())
