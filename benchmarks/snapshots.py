"""What snapshots cost while nothing fails: two jobs of the same script side by side in time, one of which takes them.

    make bench-snapshots
    python benchmarks/snapshots.py --steps 120 --every 10 --rounds 3

`apply` waits: how long the member that waited longest did not train for a snapshot (`stall_s`: describing the state,
and what of the copy the next `apply` waited for), over all snapshots. `more per snapshot`: by how much the steps of the
job with snapshots were slower than those of the one without, as seconds per snapshot; the rounds take turns. `x`: the
ratio of the mean steps. Four ranks; the default script has 4.6 M parameters and AdamW, so 55 MB of state on each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from standstill import Watch

from holdfast.protocol.events import SnapshotSaved, StepCommitted
from holdfast.testing.local_job import LocalJob

ROOT = Path(__file__).resolve().parent.parent
DENSE = ROOT / "examples" / "dense_gpt.py"
SIZES = ("--layers", "6", "--dim", "256", "--heads", "4", "--context", "16")
#: left out: the first steps allocate
WARM = 10
#: what must be reached: seconds that apply waits (median), seconds more per snapshot
STALL_S, MORE_S = 0.020, 0.4


@dataclass(frozen=True, slots=True)
class Run:
    """One job: its steps' times and its snapshots."""

    steps: list[float]
    snapshots: list[SnapshotSaved]

    @property
    def mean_s(self) -> float:
        """Of a step."""
        return statistics.mean(self.steps)


def main() -> int:
    """Run the rounds and print a table; 1 where a bound is missed."""
    options = _options()
    plain, with_them = list[Run](), list[Run]()
    with Watch():
        for _ in range(options.rounds):
            plain.append(_run(options, every=0))
            with_them.append(_run(options, every=options.every))
    stalls = [saved.stall_s for run in with_them for saved in run.snapshots]
    takes = [saved.save_s for run in with_them for saved in run.snapshots]
    pairs = list(zip(with_them, plain, strict=True))
    more = [(one.mean_s - other.mean_s) * options.every for one, other in pairs]
    ratio = [one.mean_s / other.mean_s for one, other in pairs]
    nbytes = statistics.median(saved.saved_bytes for run in with_them for saved in run.snapshots)
    print(f"{options.rounds} rounds of {options.steps} steps, one every {options.every}: {len(stalls)} snapshots")
    print(f"state                {nbytes / 1e6:8.1f} MB")
    print(f"step, without        {_span([run.mean_s for run in plain])} s")
    print(f"step, with           {_span([run.mean_s for run in with_them])} s")
    print(f"whole after          {_span(takes)} s")
    print(f"apply waits          {_span(stalls)} s (at most {STALL_S} in the median)")
    print(f"more per snapshot    {_span(more)} s (at most {MORE_S})")
    print(f"x                    {_span(ratio)}")
    return int(statistics.median(stalls) > STALL_S or statistics.median(more) > MORE_S)


def _run(options: argparse.Namespace, *, every: int) -> Run:
    command = ("--nodes", "4", *(("--snapshot-every", str(every)) if every else ()))
    arguments = (*(options.args or SIZES), "--steps", str(options.steps))
    with LocalJob(options.script, arguments, options=command) as job:
        if job.wait_exit(600.0):
            raise SystemExit(f"the job failed:\n{job.story()}")
        steps = [event.step_s for event in job.all(StepCommitted) if event.step > WARM]
        saved = [event for event in job.all(SnapshotSaved) if event.step > WARM]
    return Run(steps, saved)


def _span(values: list[float]) -> str:
    return f"{statistics.median(values):8.4f} ({min(values):.4f} to {max(values):.4f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--script", type=Path, default=DENSE)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
