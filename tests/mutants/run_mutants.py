"""Put each mutant into a copy of the source and check for detection by schedules, neighboring tests or all unit tests.

`python tests/mutants/run_mutants.py [--jobs N] [NAME ...]`
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from mutant import Mutant
from mutant_table import MUTANTS

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
SOURCE = ROOT / "src" / "holdfast"

#: rounds of the schedules in check_schedules.py
QUICK_ROUNDS, ROUNDS = 4, 60
#: CPU seconds; a mutant that makes a schedule or a test endless also counts as caught. All unit tests take 100 s.
LIMIT_S = 120
TESTS_LIMIT_S = 600
UNIT_TESTS = ("coordination", "protocol")
#: exit codes of pytest if no test has run, which do not count as caught
_USAGE_ERROR, _NO_TESTS = 4, 5


def write(mutant: Mutant, place: Path) -> None:
    """Copy the source with the mutant in it to `place`/holdfast.

    Raises:
        StaleMutantError: the source has changed.
    """
    changed, text = place / "holdfast" / mutant.file, mutant.put_into((SOURCE / mutant.file).read_text())
    unused = shutil.ignore_patterns() if mutant.tests else shutil.ignore_patterns("runtime", "control")
    shutil.copytree(SOURCE, place / "holdfast", ignore=unused)
    changed.write_text(text)
    for compiled in changed.parent.glob(f"__pycache__/{changed.stem}.*"):
        compiled.unlink()  # the bytecode of the other modules stays valid


def caught_by(mutant: Mutant, *, quick: bool = False) -> str:
    """Return the check that catches a mutant, or "". `quick`: run only a few schedules."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        write(mutant, place)
        if mutant.tests:
            return _run_tests(mutant.tests, place)
        check = str(TESTS / "mutants" / "check_schedules.py")
        folder, name = os.path.split(mutant.file)
        beside = folder or f"test_{name}"  # the tests of a folder are in a folder of the same name
        said = _run([check, "0", str(QUICK_ROUNDS)], place)  # 4 CPU seconds if nothing fails, less than any folder
        if said or quick:
            return said
        if (TESTS / beside).exists() and (said := _run_tests((beside,), place)):
            return said
        said = _run_tests(UNIT_TESTS, place)
        return said or _run([check, str(QUICK_ROUNDS), str(ROUNDS)], place)


def _run_tests(tests: tuple[str, ...], place: Path) -> str:
    """Run test files or folders (below tests/) on the mutant; return the line that names the first failure."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not processor_time", "-o", f"pythonpath={place} {ROOT}"]
    return _run(["-m", "pytest", *options, *(str(TESTS / name) for name in tests)], place, TESTS_LIMIT_S)


def _run(command: list[str], place: Path, limit_s: int = LIMIT_S) -> str:
    """Run Python on the mutant; return the line that names the failure, or ""."""
    environment = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit_s, limit_s))
        said, complaints = process.communicate()
    if process.returncode == 0:
        return ""
    if command[1] == "pytest" and process.returncode in (_USAGE_ERROR, _NO_TESTS):
        raise RuntimeError(f"no test has run: {said}{complaints}")
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"no end within {limit_s} s of the CPU"
    lines = [line for line in said.splitlines() if line.startswith(("schedule", "FAILED", "ERROR"))]
    return lines[0] if lines else (said + complaints).strip().splitlines()[-1]


def main() -> int:
    """Run all mutants, or the named ones; print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="how many at a time")
    options = parser.parse_args()
    names = options.names
    if unknown := sorted(set(names) - {mutant.name for mutant in MUTANTS}):
        print(f"no mutant is named {', '.join(unknown)}", file=sys.stderr)
        return 2
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    since, survivors = time.monotonic(), 0
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(caught_by, mutant): mutant for mutant in chosen}
        for future in as_completed(running):
            mutant, said = running[future], future.result()
            survivors += not said and not mutant.equivalent
            verdict = said or (f"equivalent: {mutant.equivalent}" if mutant.equivalent else "SURVIVES: " + mutant.why)
            print(f"{mutant.name:45} {mutant.file:28} {verdict[:160]}", flush=True)
    print(f"{len(chosen)} mutants in {time.monotonic() - since:.0f} s, {survivors} survive")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
