"""Inject faults of all kinds into one job, and check that nothing is lost and each fault is classified correctly.

    make chaos                     200 faults in 20 minutes
    make bench-faults              60 faults
    python benchmarks/chaos.py --faults 20 --minutes 5 --seed 7 --only "node killed" storm -- --on-process-failure hold

The job has four nodes, checkpoints, evaluations and data loader workers. Faults strike at random moments, each after
the job has recovered from the previous one. Kinds come in rounds, and each round has its own order. At the end the
journal is audited, and the resources of the processes are compared with those at the start. The state of every worker
after every step must equal an undisturbed run bit by bit (benchmarks/exact_training.py explains why that is possible).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos_kinds import KINDS, FaultInjector, InjectedFault
from standstill import SuspensionWatch
from struck_job import NODES, ChaosJob

from holdfast.errors import HoldfastError
from holdfast.observability.history.audit import audit_lines
from holdfast.protocol.events import (
    CoordinatorRestarted,
    FailureDetected,
    GenerationStarted,
    NodeLeft,
    RolledBack,
    StepCommitted,
)

BEGIN_STEPS = 25
SHOWN = 20


@dataclass(slots=True)
class KindResults:
    """Results of one kind of fault."""

    struck: int = 0
    #: Seconds from each fault until it was detected.
    detected_s: list[float] = field(default_factory=list[float])
    #: Seconds from each fault until the first step committed after recovery.
    recovered_s: list[float] = field(default_factory=list[float])
    #: Committed steps that were rolled back.
    lost_steps: int = 0
    #: How often the job reported each failure kind, severity and category.
    reports: Counter[str] = field(default_factory=Counter[str])
    #: Descriptions of wrong reports and of unexpected losses.
    wrong: list[str] = field(default_factory=list[str])


def main() -> int:
    """Inject the faults and print the table; return 1 if anything was lost, leaked or misclassified."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--faults", type=int, default=200, help="number of faults; a kind that strikes twice counts as two"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="no further fault after this time")
    parser.add_argument("--seed", type=int, default=1, help="of all random choices; an odd seed reads data as streams")
    parser.add_argument("--only", nargs="+", choices=sorted(KINDS), help="only these kinds", metavar="KIND")
    parser.add_argument("--loader-workers", type=int, default=1, help="data loader processes of each worker")
    parser.add_argument("options", nargs="*", help="further options of `holdfast run`, after --")
    parser.add_argument("--keep", type=Path, help="keep the job's files in this folder, which must not exist yet")
    options = parser.parse_args()
    with SuspensionWatch() as watch, tempfile.TemporaryDirectory(prefix="holdfast-") as temporary:
        folder = options.keep or Path(temporary) / "chaos"
        folder.mkdir(parents=True)
        data = [*(["--streams"] if options.seed % 2 else ()), "--loader-workers", str(options.loader_workers)]
        with ChaosJob(folder, data, options.options) as struck:
            chaos = Chaos(struck, options.seed, options.only or list(KINDS))
            chaos.start()
            chaos.inject_faults(options.faults, options.minutes * 60.0)
            return chaos.report(watch)


def draw_rounds(kinds: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Yield all kinds forever, each round in its own random order."""
    while True:
        yield from rng.sample(kinds, len(kinds))


class Chaos:
    """Injects faults into one job and collects the results."""

    def __init__(self, struck: ChaosJob, seed: int, kinds: Sequence[str]) -> None:
        self.struck = struck
        rng = random.Random(seed)
        self._blows = FaultInjector(struck, random.Random(rng.random()))
        self._kinds = draw_rounds(kinds, rng)
        self._tallies: dict[str, KindResults] = {}
        self._faults = 0
        self._wrong: list[str] = []
        self._taken_s = 0.0

    def start(self) -> None:
        """Train for a while, then record the resources that the job holds."""
        self.struck.wait_recovered(0, BEGIN_STEPS)
        self.struck.record_baseline()

    def inject_faults(self, faults: int, longest_s: float) -> None:
        """Inject faults until their number or the time is reached, or until the job cannot recover."""
        began = time.monotonic()
        while self._faults < faults and time.monotonic() < began + longest_s:
            kind = next(self._kinds)
            try:
                self._inject_one(kind)
            except (HoldfastError, AssertionError) as error:
                self._wrong.append(f"{kind}: {str(error).splitlines()[0]}")
                print(f"{kind}: {error}", flush=True)
                if not self._restore_nodes():
                    break
        self._taken_s = time.monotonic() - began

    def _inject_one(self, kind: str) -> None:
        """Inject one fault, wait until the job has recovered, and record the reported failures."""
        struck = self.struck
        place, step = struck.event_count, struck.last_step()
        blow = self._blows.inject(kind)
        if blow is None:
            return
        tally = self._tallies.setdefault(kind, KindResults())
        tally.struck += 1
        self._faults += blow.faults
        for node in blow.expected:
            failure = struck.wait(FailureDetected, lambda e, node=node: blow.any_node or e.node == node, since=place)
            tally.detected_s.append(max(0.0, failure.time - blow.at))
        blow.heal()
        if blow.ends_job:
            struck.restart()
        struck.add_nodes(blow.lost_nodes)
        first = self._wait_recovered(blow, place)
        tally.recovered_s.append(first.time - blow.at)
        self._check_reports(kind, tally, blow, place, step)
        spans = f"seen {_last(tally.detected_s)}, over after {tally.recovered_s[-1]:6.2f} s"
        print(f"{self._faults:4d} {kind:42s} {spans}, step {struck.last_step()}", flush=True)

    def _wait_recovered(self, blow: InjectedFault, place: int) -> StepCommitted:
        """Wait until all nodes train again; return the first step committed after the last detected failure."""
        struck = self.struck
        reports = [
            *struck.events_since(FailureDetected, place),
            *(struck.events_since(CoordinatorRestarted, place) if blow.ends_job else ()),
        ]
        last = max((e.time for e in reports), default=blow.at)
        struck.wait_recovered(struck.job.events.index(reports[-1]) if reports else place)
        after = [e for e in struck.events_since(StepCommitted, place) if e.time > last]
        return after[0] if after else struck.wait(StepCommitted, lambda e: e.time > last, since=place)

    def _check_reports(self, kind: str, tally: KindResults, blow: InjectedFault, place: int, step: int) -> None:
        """Compare the reported failures with the injected fault."""
        struck = self.struck
        reports = struck.events_since(FailureDetected, place)
        tally.reports.update(f"{e.kind} {e.severity} {e.category}" for e in reports)
        for failure in reports:
            expected = next(iter(blow.expected.values())) if blow.any_node else blow.expected.get(failure.node)
            if expected is None:
                tally.wrong.append(f"{kind}: {failure.node} is blamed: {failure.kind}, {failure.detail}")
            elif wrong := expected.mismatch(failure):
                tally.wrong.append(f"{kind}: {wrong}")
        if not reports and not blow.expected:
            tally.reports["nothing"] += 1
        back = struck.events_since(RolledBack, place)
        lost = sum(max(0, self._last_step_before(e) - e.to_step) for e in back)
        tally.lost_steps += lost
        if back and not blow.may_lose_steps:
            tally.wrong.append(f"{kind}: rolled back from step {step} to {back[0].to_step}")
        tally.wrong += [
            f"{kind}: {e.node} is quarantined"
            for e in struck.events_since(NodeLeft, place)
            if e.reason == "quarantined"
        ]

    def _last_step_before(self, rolled_back: RolledBack) -> int:
        events = list(self.struck.job.events)
        steps = [e.step for e in events[: events.index(rolled_back)] if isinstance(e, StepCommitted)]
        return steps[-1] if steps else 0

    def _restore_nodes(self) -> bool:
        """Add the missing nodes to a job; return False if it does not train again."""
        struck = self.struck
        if struck.job.process is None or struck.job.process.poll() is not None:
            return False
        try:
            newest = struck.job.all(GenerationStarted)[-1]
            struck.add_nodes(max(0, NODES - len(newest.members)))
            struck.wait_recovered(struck.event_count)
        except HoldfastError as error:
            print(f"the job does not recover: {error}", flush=True)
            return False
        return True

    # ---- the result ----

    def report(self, watch: SuspensionWatch) -> int:
        """Print the table and all findings; return 1 if anything is wrong."""
        struck = self.struck
        self._print_table()
        print(
            f"{self._faults} faults in {self._taken_s / 60:.1f} minutes, {struck.last_step()} steps; {watch.report()}"
        )
        wrong = [*self._wrong, *(why for tally in self._tallies.values() for why in tally.wrong)]
        if struck.job.process is not None and struck.job.process.poll() is None:
            wrong += struck.find_leaks()
            wrong += struck.stop()
        with struck.job.events_file.open("rb") as journal:
            audited = audit_lines(journal)
        print(
            f"audit: {audited.proven} of {audited.steps} steps had each micro-batch exactly once, {audited.undone} "
            f"undone, {audited.lost_events} events lost"
        )
        wrong += [f"line {finding.line}: {finding.what}" for finding in audited.findings]
        wrong += [f"{audited.unproven} steps are not proven"] if audited.unproven else []
        differing = struck.find_differences()
        wrong += [f"{len(differing)} states differ from the undisturbed run's"] if differing else []
        wrong += differing[:SHOWN]
        print("wrong: " + ("nothing" if not wrong else "\n  ".join(["", *wrong])))
        return 1 if wrong else 0

    def _print_table(self) -> None:
        print(f"\n{'kind':42s} struck  seen after s       over after s       steps lost  taken for")
        for kind, tally in sorted(self._tallies.items()):
            taken = ", ".join(f"{times} x {what}" for what, times in tally.reports.most_common())
            spans = f"{_spread(tally.detected_s):18s} {_spread(tally.recovered_s):18s}"
            print(f"{kind:42s} {tally.struck:6d}  {spans} {tally.lost_steps:10d}  {taken}")


def _spread(values: Sequence[float]) -> str:
    """Format the median and the maximum."""
    return f"{statistics.median(values):.2f} (most {max(values):.2f})" if values else "-"


def _last(values: Sequence[float]) -> str:
    return f"{values[-1]:5.2f} s" if values else "     -"


if __name__ == "__main__":
    sys.exit(main())
