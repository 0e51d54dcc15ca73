"""The process of one check: `python -m benchmarks.gpu_check.one_check MODULE --device cpu --folder DIR [--quick]`.

Prints the check's figures as JSON on the last line, also if it fails: then with the problem.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from benchmarks.gpu_check.options import NOT_POSSIBLE, Figures, NotPossibleError, Options


def main() -> int:
    """Run the check and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    # The jobs of a check end with it, because its context managers are left.
    signal.signal(signal.SIGTERM, _end)
    given.folder.mkdir(parents=True, exist_ok=True)
    options = Options(device=given.device, quick=given.quick, folder=given.folder)
    figures: Figures = {}
    code = 0
    try:
        importlib.import_module(f"benchmarks.gpu_check.checks.{given.module}").run(options, figures)
    except NotPossibleError as error:
        figures["problem"], code = str(error), NOT_POSSIBLE
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a check raises is its result
        traceback.print_exc()
        figures["problem"], code = f"{type(error).__name__}: {error}".splitlines()[0], 1
    sys.stderr.flush()
    print(json.dumps(figures), flush=True)
    return code


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


sys.exit(main())
