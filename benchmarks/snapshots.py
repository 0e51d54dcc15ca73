"""Measure the cost of saving without failures: two jobs of the same script, one of which saves.

    make bench-snapshots
    python benchmarks/snapshots.py --steps 120 --every 10 --rounds 3
    python benchmarks/snapshots.py --checkpoints --steps 600 --rounds 2

`apply` waits: how long the slowest member did not train because of a snapshot (`stall_s`: describing the state, and the
part of the copy for which the next `apply` waited), over all snapshots. `more per snapshot`: the additional time of the
steps with snapshots, as seconds per snapshot; the two jobs alternate. `x`: the ratio of the mean steps. There are four
ranks. The default script has 4.6 M parameters and AdamW, so each rank has 55 MB of state. With `--checkpoints`, the job
writes checkpoints to disk at the period that it chooses, instead of snapshots in memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from standstill import SuspensionWatch

from holdfast.protocol.events import CheckpointSaved, SnapshotSaved, StepCommitted
from tests.harness.local_job import LocalJob

ROOT = Path(__file__).resolve().parent.parent
DENSE = ROOT / "examples" / "dense_gpt.py"
SIZES = ("--layers", "6", "--dim", "256", "--heads", "4", "--context", "16")
#: The first steps allocate memory and are not counted.
WARM = 10
#: Limits: median seconds that apply waits, and additional seconds per snapshot.
STALL_S, MORE_S = 0.020, 0.4
#: Allowed slowdown of a job that saves at the period it chooses.
SLOWER = 1.03


@dataclass(frozen=True, slots=True)
class Run:
    """The step times of one job, and its saves."""

    steps: list[float]
    saves: Sequence[SnapshotSaved | CheckpointSaved]

    @property
    def mean_s(self) -> float:
        """Mean seconds of a step."""
        return statistics.mean(self.steps)


def main() -> int:
    """Run the rounds and print a table; return 1 if a limit is exceeded."""
    options = _options()
    plain, with_them = list[Run](), list[Run]()
    with SuspensionWatch():
        for _ in range(options.rounds):
            plain.append(_run(options, saved=False))
            with_them.append(_run(options, saved=True))
    saves = [save for run in with_them for save in run.saves]
    pairs = list(zip(with_them, plain, strict=True))
    ratio = [one.mean_s / other.mean_s for one, other in pairs]
    stalls = [save.stall_s for save in saves]
    if not saves:
        raise SystemExit(f"nothing was saved in {options.steps} steps: give more --steps")
    how = "at the period chosen" if options.checkpoints else f"one every {options.every}"
    print(f"{options.rounds} rounds of {options.steps} steps, {how}: {len(saves)} saved")
    print(f"state                {statistics.median(save.saved_bytes for save in saves) / 1e6:8.1f} MB")
    print(f"step, without        {_span([run.mean_s for run in plain])} s")
    print(f"step, with           {_span([run.mean_s for run in with_them])} s")
    print(f"complete after       {_span([save.save_s for save in saves])} s")
    print(f"apply waits          {_span(stalls)} s (at most {STALL_S} in the median)")
    if options.checkpoints:
        print(f"x                    {_span(ratio)} (at most {SLOWER})")
        return int(statistics.median(stalls) > STALL_S or statistics.median(ratio) > SLOWER)
    more = [(one.mean_s - other.mean_s) * options.every for one, other in pairs]
    print(f"more per snapshot    {_span(more)} s (at most {MORE_S})")
    print(f"x                    {_span(ratio)}")
    return int(statistics.median(stalls) > STALL_S or statistics.median(more) > MORE_S)


def _run(options: argparse.Namespace, *, saved: bool) -> Run:
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        saving = ("--checkpoint-dir", folder) if options.checkpoints else ("--snapshot-every", str(options.every))
        command = ("--nodes", "4", *(saving if saved else ()))
        arguments = (*(options.args or SIZES), "--steps", str(options.steps))
        with LocalJob(options.script, arguments, options=command) as job:
            if job.wait_exit(600.0):
                raise SystemExit(f"the job failed:\n{job.story()}")
            steps = [event.step_s for event in job.all(StepCommitted) if event.step > WARM]
            saves = job.all(CheckpointSaved if options.checkpoints else SnapshotSaved)
    return Run(steps, [save for save in saves if WARM < save.step < options.steps])


def _span(values: list[float]) -> str:
    return f"{statistics.median(values):8.4f} ({min(values):.4f} to {max(values):.4f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument(
        "--checkpoints", action="store_true", help="save checkpoints to disk, at the period that the job chooses"
    )
    parser.add_argument("--script", type=Path, default=DENSE)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
