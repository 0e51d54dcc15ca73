"""The process of one check: `python -m benchmarks.gpu_check.one_check MODULE --device cpu --folder DIR [--quick]`.

Prints the check's figures as JSON on the last line. If the check fails, they include the problem.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from benchmarks.gpu_check.options import NOT_POSSIBLE, Figures, NotPossibleError, Options

#: Packages of the repository. A missing module of these is a failure of the check, not a property of the machine.
OWN_PACKAGES = ("benchmarks", "dense_gpt", "holdfast", "tests")


def main() -> int:
    """Run the check and print its figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    # An exception leaves the check's context managers, which end its jobs.
    signal.signal(signal.SIGTERM, _exit)
    args.folder.mkdir(parents=True, exist_ok=True)
    options = Options(device=args.device, quick=args.quick, folder=args.folder)
    figures: Figures = {}
    code = 0
    try:
        _run(args.module, options, figures)
    except NotPossibleError as error:
        figures["problem"], code = str(error), NOT_POSSIBLE
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any exception of a check is its result
        traceback.print_exc()
        figures["problem"], code = f"{type(error).__name__}: {error}".splitlines()[0], 1
    sys.stderr.flush()
    print(json.dumps(figures), flush=True)
    return code


def _run(module: str, options: Options, figures: Figures) -> None:
    try:
        # The imports are part of the check: a package may be missing on this machine.
        from holdfast.control.processes import die_with_parent

        die_with_parent(os.getppid())
        importlib.import_module(f"benchmarks.gpu_check.checks.{module}").run(options, figures)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OWN_PACKAGES:
            raise
        raise NotPossibleError(f"{error}: install it, or use --wheels (docs/gpu.md)") from None


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
