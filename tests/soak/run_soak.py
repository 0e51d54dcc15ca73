"""Run the tests that take too long for `make test`, and write a result file.

    make soak                                        # everything: several hours on two cores
    python tests/soak/run_soak.py --only schedules --schedules 5000

Each part is a command of its own, so that a failing part can be run again alone. The result file
(benchmarks/results/soak.txt) holds the commit, each command, its exit code and the end of its output. Exit code 1: at
least one part failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RESULT = ROOT / "benchmarks" / "results" / "soak.txt"
#: Lines of a part's output that the result file keeps: enough for the table of all families of schedules.
KEPT_LINES = 120


@dataclass(frozen=True)
class Part:
    """One command of the soak run."""

    name: str
    command: tuple[str, ...]


def parts(schedules: int, writes: int, repeats: int) -> list[Part]:
    """Return the parts of a whole run."""
    return [
        Part("schedules", ("-m", "tests.simulation", "fuzz", "--schedules", str(schedules))),
        Part("writes", ("-m", "tests.simulation", "writes", "--schedules", str(writes))),
        Part("mutants", ("tests/mutants/run_mutants.py",)),
        Part("long", ("-m", "pytest", "-q", "-n", "2", "-m", "soak", "--ignore", "tests/integration")),
        *(
            Part(f"integration-{number}", ("-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "tests/integration"))
            for number in range(1, repeats + 1)
        ),
    ]


def run(part: Part) -> tuple[int, str]:
    """Run a part; return its exit code and its paragraph in the result file."""
    since = time.monotonic()
    done = subprocess.run(
        [sys.executable, *part.command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    end = "\n".join(done.stdout.splitlines()[-KEPT_LINES:])
    took_s = time.monotonic() - since
    command = " ".join(("python", *part.command))
    return done.returncode, f"== {part.name}: exit code {done.returncode}, {took_s:.0f} s\n$ {command}\n{end}\n"


def main() -> int:
    """Run the chosen parts, write the result file, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100_000, help="fresh fault schedules (default: 100000)")
    parser.add_argument("--writes", type=int, default=200, help="schedules with a crash at every write (default: 200)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the integration tests (default: 3)")
    parser.add_argument("--only", action="append", help="run only parts that begin with this name")
    parser.add_argument(
        "--out", type=Path, default=RESULT, help=f"the result file (default: {RESULT.relative_to(ROOT)})"
    )
    options = parser.parse_args()
    chosen = [
        part
        for part in parts(options.schedules, options.writes, options.repeats)
        if not options.only or part.name.startswith(tuple(options.only))
    ]
    if not chosen:
        parser.error(f"--only {options.only}: give schedules, writes, mutants, long or integration")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    now = datetime.datetime.now(tz=datetime.UTC)
    said = [f"commit {commit or 'unknown'}, {now:%Y-%m-%d %H:%M} UTC, {len(os.sched_getaffinity(0))} cores\n"]
    failed = 0
    for part in chosen:
        print(f"{part.name} ...", flush=True)
        code, paragraph = run(part)
        failed += code != 0
        said.append(paragraph)
        options.out.write_text("\n".join(said))
        print(paragraph, flush=True)
    print(f"{len(chosen)} parts, {failed} failed; {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
