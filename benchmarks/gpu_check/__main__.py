"""Check holdfast on a GPU, in at most eight minutes. Results are written after each check.

    python -m benchmarks.gpu_check [--quick] [--device cpu] [--only NAME] [--wheels DIR] [--out DIR]

Needs no installation: run it in the repository. Exit code 1: a check failed; 2: nothing could be checked;
130: interrupted.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu_check.options import NotPossibleError
from benchmarks.gpu_check.report import as_markdown, copy_logs, results_path, write_results
from benchmarks.gpu_check.runner import (
    FAILED,
    INTERRUPTED,
    NOT_RUN,
    Check,
    Outcome,
    check_command,
    run_checks,
)
from benchmarks.gpu_check.wheels import unpack_wheels

ROOT = Path(__file__).resolve().parent.parent.parent
#: Eight minutes, less the time to end a check that hangs.
BUDGET_S = 465.0
#: The first check. If it cannot run, no other can.
MACHINE = "machine"

#: name, question, time limit in seconds; the most important first
CHECKS = (
    (MACHINE, "Which GPU, driver and versions are here, and is the GPU's memory free?", 60.0),
    ("training", "Are one worker's losses right, and how long does a step take with and without holdfast?", 120.0),
    ("four_workers", "Do four workers on one device go on after one is killed and another one joins?", 150.0),
    ("nccl", "Can NCCL groups be built, swapped and aborted?", 60.0),
    ("errors", "How are CUDA errors of one worker classified, and do the other workers go on?", 120.0),
    ("dispatch", "Do Triton's kernels agree with torch's, and how fast are they?", 90.0),
    ("snapshots", "How long do snapshots, checkpoints and the transfer of state to a new worker take?", 150.0),
    ("fsdp", "Do two workers that share a model with FSDP2 have the losses of one worker?", 90.0),
    ("warming", "How long does a new worker's first step take, cold and warm?", 180.0),
)


def main() -> int:
    """Run the checks and print their table; return the exit code."""
    args = _parser().parse_args()
    _interrupt_on(signal.SIGTERM, signal.SIGHUP)
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-check-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            args.out = _prepare_folder("--out", args.out)
            args.logs = args.logs and _prepare_folder("--logs", args.logs)
            environment = _environment(args, folder)
        except NotPossibleError as error:
            print(error, file=sys.stderr)
            return 2
        os.chdir(ROOT)
        outcomes = run_checks(
            _select_checks(args, folder),
            budget_s=args.budget,
            environment=environment,
            folder=folder,
            on_outcome=lambda outcomes: _on_outcome(args, folder, outcomes),
        )
    machine = _machine_facts(outcomes, args.device)
    print(as_markdown(machine, outcomes))
    print(f"results: {results_path(args.out, machine)}")
    return _exit_code(outcomes)


def _on_outcome(args: argparse.Namespace, folder: Path, outcomes: Sequence[Outcome]) -> str:
    """Write the results so far; return a reason not to run the other checks, or ""."""
    latest = outcomes[-1]
    try:
        write_results(args.out, _machine_facts(outcomes, args.device), outcomes)
        if args.logs is not None:
            copy_logs(folder, latest.name, args.logs)
    except OSError as error:
        print(f"cannot write the results of {latest.name}: {error}", file=sys.stderr)
    print(f"{latest.name}: {latest.status} {latest.reason} ({latest.seconds:.1f} s)", flush=True)
    return latest.reason if latest.name == MACHINE and latest.status == NOT_RUN else ""


def _exit_code(outcomes: Sequence[Outcome]) -> int:
    if any(outcome.reason == INTERRUPTED for outcome in outcomes):
        return 130
    others = [outcome for outcome in outcomes if outcome.name != MACHINE]
    if not any(outcome.was_run for outcome in others or outcomes):
        return 2
    return 1 if any(outcome.status == FAILED for outcome in outcomes) else 0


def _interrupt_on(*signals: signal.Signals) -> None:
    """Handle these signals as Ctrl-C, unless they are ignored, as under nohup."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for one in signals:
        if signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, interrupt)


def _prepare_folder(option: str, folder: Path) -> Path:
    """Create a folder if it is missing; return its absolute path.

    Raises:
        NotPossibleError: no file can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder.resolve()
    except OSError as error:
        raise NotPossibleError(f"{option} {folder}: {error.strerror}; name a folder that can be written") from None


def _environment(args: argparse.Namespace, folder: Path) -> Mapping[str, str]:
    """Return the environment of the checks; unpacks the wheels.

    Raises:
        NotPossibleError: the wheels cannot be used.
    """
    paths = [ROOT, ROOT / "src", ROOT / "examples"]
    if args.wheels is not None:
        unpack_wheels(args.wheels, folder / "wheels")
        paths.append(folder / "wheels")
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *inherited]),
        # A job that is killed leaves files in its temporary folder; a compiler's cache would warm a later run.
        "TMPDIR": str(folder),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }
    if args.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    return environment


def _select_checks(args: argparse.Namespace, folder: Path) -> list[Check]:
    """Return the checks to run; the check of the machine is always the first."""
    arguments = ("--device", args.device, *(("--quick",) if args.quick else ()))
    return [
        Check(
            name=name,
            question=question,
            limit_s=limit_s,
            command=check_command(name, *arguments, "--folder", str(folder / name)),
        )
        for name, question, limit_s in CHECKS
        if not args.only or name in (MACHINE, *args.only)
    ]


def _machine_facts(outcomes: Sequence[Outcome], device: str) -> dict[str, Any]:
    """Return the facts that the first check has found."""
    facts = outcomes[0].figures if outcomes and outcomes[0].name == MACHINE else {}
    return facts or {"gpu": "unknown" if device == "cuda" else "cpu"}


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0 or math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


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
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="folder with the wheels that this machine lacks (gpu_wheels.sh)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=ROOT / "benchmarks" / "results",
        help="folder for the results (default: benchmarks/results)",
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="folder for the events and the output of all jobs")
    parser.add_argument(
        "--budget",
        type=_seconds,
        metavar="SECONDS",
        default=BUDGET_S,
        help=f"time for all checks together (default: {BUDGET_S:.0f})",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
