"""Check holdfast on a GPU: one command, a fixed time, results that are written after each check.

    python -m benchmarks.gpu_check [--quick] [--device cpu] [--only NAME] [--wheels DIR] [--out DIR]

Needs no installation: run it in the repository. Exit code 1: a check failed; 2: nothing could be checked.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.options import NotPossibleError
from benchmarks.gpu_check.report import as_markdown, copy_logs, write_results
from benchmarks.gpu_check.runner import FAILED, Check, Outcome, check_command, run_checks
from benchmarks.gpu_check.wheels import unpack_wheels

ROOT = Path(__file__).resolve().parent.parent.parent
BUDGET_S = 480.0
#: the first check: what it finds decides whether the others can run
MACHINE = "machine"

#: name, what it answers, time limit in seconds; the most important first
CHECKS = (
    (MACHINE, "Which GPU, driver and versions are here, and is the GPU's memory free?", 60.0),
    ("training", "Does one worker train on the device as on the CPU, and what does holdfast cost per step?", 120.0),
    ("four_workers", "Do four workers train on one device, through the loss and the arrival of a worker?", 150.0),
    ("nccl", "Can NCCL groups be built, swapped and aborted?", 60.0),
    ("errors", "Which class has a CUDA error in one worker, and what happens to the other workers?", 120.0),
    ("dispatch", "Do Triton's kernels agree with torch's, and how fast are they?", 90.0),
    ("snapshots", "What do snapshots, checkpoints and the transfer of state cost?", 150.0),
    ("fsdp", "Do two workers that share a model with FSDP2 train as one?", 90.0),
    ("warming", "How long does a new worker's first step take, cold and warm?", 180.0),
)


def main() -> int:
    """Run the checks and print their table."""
    given = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-check-") as name:
        folder = Path(name)
        try:
            paths = _python_path(given.wheels, folder)
        except NotPossibleError as error:
            print(error, file=sys.stderr)
            return 2
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
        if given.device == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

        given.out = given.out.resolve()
        given.logs = given.logs and given.logs.resolve()
        written = given.out

        def on_outcome(outcomes: Sequence[Outcome]) -> str:
            nonlocal written
            latest = outcomes[-1]
            print(f"{latest.name}: {latest.status} {latest.reason} ({latest.seconds:.1f} s)", flush=True)
            if given.logs is not None:
                copy_logs(folder, latest.name, given.logs)
            written = write_results(given.out, _machine(outcomes, given.device), outcomes)
            no_device = latest.name == MACHINE and not latest.figures.get("usable", False)
            return latest.reason or "the device cannot be used" if no_device else ""

        os.chdir(ROOT)
        outcomes = run_checks(
            _selected(given, folder),
            budget_s=given.budget,
            environment=environment,
            folder=folder,
            on_outcome=on_outcome,
        )
    print(as_markdown(_machine(outcomes, given.device), outcomes))
    print(f"written to {written}")
    if any(outcome.status == FAILED and outcome.name != MACHINE for outcome in outcomes):
        return 1
    if not any(outcome.was_run for outcome in outcomes if outcome.name != MACHINE):
        return 2
    return 0


def _selected(given: argparse.Namespace, folder: Path) -> list[Check]:
    """Return the checks to run; that of the machine always comes first."""
    arguments = ("--device", given.device, *(("--quick",) if given.quick else ()))
    return [
        Check(
            name=name,
            question=question,
            limit_s=limit_s,
            command=check_command(name, *arguments, "--folder", str(folder / name)),
        )
        for name, question, limit_s in CHECKS
        if not given.only or name in (MACHINE, *given.only)
    ]


def _python_path(wheels: Path | None, folder: Path) -> list[str]:
    paths = [str(ROOT), str(ROOT / "src"), str(ROOT / "examples")]
    if wheels is not None:
        unpack_wheels(wheels, folder / "wheels")
        paths.append(str(folder / "wheels"))
    return paths + [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _machine(outcomes: Sequence[Outcome], device: str) -> dict[str, Any]:
    facts = outcomes[0].figures if outcomes and outcomes[0].name == MACHINE else {}
    return facts or {"gpu": "unknown" if device == "cuda" else "cpu"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: try the checks without a GPU")
    names = [name for name, _, _ in CHECKS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    parser.add_argument("--wheels", type=Path, help="folder with the wheels that this machine lacks (gpu_wheels.sh)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="folder for the events and the output of all jobs")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all checks together")
    return parser


sys.exit(main())
