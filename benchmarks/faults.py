"""Mixed faults in one job: nothing may be lost, and each must be taken for what it was.

    make bench-faults
    python benchmarks/faults.py --count 12

Kinds come in turns, at random moments of random nodes of a job of four; storms (a fault during the recovery from
another) are among them. All that is said comes from the job's own event file.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from recovery import DENSE, DENSE_ARGS
from standstill import Watch

from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    NodeLeft,
    Recovered,
    RolledBack,
    StepCommitted,
)
from holdfast.testing.local_job import LocalJob

NODES = 4
SETTLE_STEPS = 3
#: a fault that the job has not got over after this time, in seconds, is not got over
LONGEST_S = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A fault, and what it must be taken for; of severity 3 another node may have met it.

    process: only a worker's process is meant. storm: another node's process is killed during the recovery.
    """

    name: str
    fault: str
    kinds: tuple[str, ...]
    severity: int
    categories: tuple[str, ...] = ()
    phase: str = ""
    process: bool = False
    storm: bool = False
    returns: bool = True


KINDS = (
    Kind(name="node killed", fault="kill", kinds=("connection_lost",), severity=1, returns=False),
    Kind(name="process killed", fault="kill", kinds=("process_exit",), severity=2, process=True),
    Kind(name="exception", fault="raise", kinds=("exception",), severity=2),
    Kind(name="thread hangs", fault="hang", kinds=("hang",), severity=2),
    Kind(name="node exits", fault="exit", kinds=("connection_lost",), severity=1, returns=False),
    Kind(name="no memory", fault="memory", kinds=("exception",), severity=2, categories=("out_of_memory",)),
    Kind(name="connections drop", fault="drop", kinds=("connection_lost",), severity=3, phase="voted"),
    Kind(name="process exits", fault="exit", kinds=("process_exit",), severity=2, process=True),
    Kind(name="process stopped", fault="freeze", kinds=("hang",), severity=2, process=True),
    Kind(name="storm", fault="kill", kinds=("process_exit",), severity=2, process=True, storm=True),
)


def main() -> int:
    """Run the benchmark and print its table; 1 if anything was lost, or taken for what it was not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="of faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=[kind.name for kind in KINDS], help="only this kind")
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if not options.only or kind.name in options.only]
    run = LocalJob(DENSE, DENSE_ARGS, options=("--nodes", str(NODES), "--allow-faults", "--max-restarts", "1000"))
    with Watch() as watch, run as job:
        storm = Storm(job, random.Random(options.seed))
        storm.settle(20)
        for kind in itertools.islice(itertools.cycle(kinds), options.count):
            storm.strike(kind)
        return storm.report(watch)


class Storm:
    """One job, struck again and again."""

    def __init__(self, job: LocalJob, rng: random.Random) -> None:
        self.job = job
        self.rng = rng
        self.struck: Counter[str] = Counter()
        self.right: Counter[str] = Counter()
        self.wrong: list[str] = []

    def strike(self, kind: Kind) -> None:
        """Inject one fault, wait until the job has got over it, and look what it was taken for."""
        job, since = self.job, len(self.job.events)
        node, other = self.rng.sample(job.nodes(), 2)
        time.sleep(self.rng.random() * 0.2)
        job.inject(kind.fault, node, worker=0 if kind.process else None, phase=kind.phase)
        told = job.wait(FailureDetected, since=since, timeout=LONGEST_S)
        if kind.storm:
            job.inject("kill", other, worker=0)
            job.wait(FailureDetected, node=other, since=since, timeout=LONGEST_S)
        if not kind.returns:
            job.wait(NodeLeft, node=node, since=since, timeout=LONGEST_S)
            with job.client() as client:
                client.add_nodes()
        self.struck[kind.name] += 1
        why = self._taken_for(kind, told, node)
        if not why:
            self.right[kind.name] += 1
        else:
            self.wrong.append(f"{kind.name} on {node}: {why}")
        print(
            f"{kind.name:18s} {told.kind}, {told.category}, severity {told.severity}, {told.detail[:70]!r}", flush=True
        )
        self._whole_again(since)

    def _taken_for(self, kind: Kind, told: FailureDetected, node: str) -> str:
        """Return what a fault was taken for that it was not, "" for nothing."""
        if kind.severity < 3 and told.node != node:
            return f"{told.node} was held to have failed: {told.detail}"
        if told.kind not in kind.kinds or told.severity != kind.severity:
            return f"it was taken for {told.kind} of severity {told.severity}: {told.detail}"
        if kind.categories and told.category not in kind.categories:
            return f"it was classified as {told.category}: {told.detail}"
        return ""

    def _whole_again(self, since: int) -> None:
        """Wait until all nodes train and all that was detected is got over."""
        job = self.job
        whole = job.wait(
            GenerationStarted,
            lambda e: e.world_size == NODES and e is self._generations()[-1],
            since=since,
            timeout=LONGEST_S,
        )
        job.wait(Recovered, since=job.events.index(whole), timeout=LONGEST_S)
        self.settle(SETTLE_STEPS)

    def _generations(self) -> Sequence[GenerationStarted]:
        return self.job.all(GenerationStarted)

    def settle(self, steps: int) -> None:
        """Wait for so many steps more."""
        known = self.job.all(StepCommitted)
        wanted = (known[-1].step if known else 0) + steps
        self.job.wait(StepCommitted, lambda e: e.step >= wanted, timeout=LONGEST_S)

    def report(self, watch: Watch) -> int:
        """Print the table; return 1 if anything was lost or taken for what it was not."""
        print(f"\n{'fault':20s} struck  taken for what it was")
        for name, times in self.struck.items():
            print(f"{name:20s} {times:6d}  {self.right[name]:6d}")
        steps = self.job.all(StepCommitted)
        wrong = [f"steps {a.step} -> {b.step}" for a, b in itertools.pairwise(steps) if b.step != a.step + 1]
        wrong += [f"step {e.step} has {e.samples} samples" for e in steps if e.samples != steps[0].samples]
        wrong += [f"rolled back to {e.to_step}" for e in self.job.all(RolledBack)]
        wrong += [f"{e.node} is quarantined" for e in self.job.all(NodeLeft) if e.reason == "quarantined"]
        failures, told = self.job.all(FailureDetected), sum(self.struck.values()) + self.struck["storm"]
        if len(failures) != told:
            wrong.append(f"{told} faults, {len(failures)} failures")
        print(watch.report())
        print("lost: " + ("nothing" if not wrong else "; ".join(wrong)))
        print("\n".join(self.wrong))
        return 1 if wrong or self.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
