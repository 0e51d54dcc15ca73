"""Runs checks one after the other, each in its own process, within a total time budget."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.options import NOT_POSSIBLE, Figures

#: Characters of a failed check's output that the results keep.
OUTPUT_CHARACTERS = 16_000
#: Bytes at the end of a check's output that are read; the figures must fit into them.
OUTPUT_BYTES = 1_000_000
#: Time for a check to end its own child processes after SIGTERM, before SIGKILL.
GRACE_S = 8.0
#: A check starts only if at least this share of its time limit is left of the budget.
MIN_TIME_SHARE = 0.4

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
#: The reason of checks without a result because the user ended the run.
INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check: a command that prints its figures as JSON on the last line."""

    name: str
    #: The question that the check answers, as one sentence.
    question: str
    #: Seconds after which the check is ended.
    limit_s: float
    command: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a check."""

    name: str
    question: str
    status: str
    #: Why it failed or did not run, in one line.
    reason: str = ""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict[str, Any])
    #: The end of the output, if the check failed.
    output: str = ""

    @property
    def was_run(self) -> bool:
        """Whether the check has a result."""
        return self.status != NOT_RUN


def run_checks(
    checks: Sequence[Check],
    *,
    budget_s: float,
    environment: Mapping[str, str],
    folder: Path,
    on_outcome: Callable[[Sequence[Outcome]], str],
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run the checks in order and return their outcomes. After a KeyboardInterrupt, the rest is not run.

    Args:
        folder: for the output of the checks.
        on_outcome: called with all outcomes after each check; a text that it returns is the reason not to run the rest.
    """
    deadline = clock() + budget_s
    outcomes: list[Outcome] = []
    stop = ""
    for check in checks:
        left_s = deadline - clock()
        if stop or left_s < MIN_TIME_SHARE * check.limit_s:
            outcome = _not_run(check, stop or "no time left")
        else:
            try:
                outcome = run_check(check, limit_s=min(check.limit_s, left_s), environment=environment, folder=folder)
            except KeyboardInterrupt:
                stop = INTERRUPTED
                outcome = _not_run(check, stop)
        outcomes.append(outcome)
        stop = on_outcome(outcomes) or stop
    return outcomes


def run_check(check: Check, *, limit_s: float, environment: Mapping[str, str], folder: Path) -> Outcome:
    """Run one check in its own process group, and end the whole group."""
    output_file = folder / f"{check.name}.txt"
    began = time.monotonic()
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            check.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        code = process.wait(limit_s)
        reason = "" if code == 0 else _describe_exit(code)
    except subprocess.TimeoutExpired:
        reason = f"took longer than {limit_s:.0f} s"
        code = _end(process)
    except KeyboardInterrupt:
        _end(process)
        raise
    finally:
        _kill_group(process)
    seconds = time.monotonic() - began
    text = read_end(output_file, OUTPUT_BYTES).decode(errors="replace")
    figures = _parse_figures(text)
    if figures is None and not reason:
        reason = "printed no figures"
    figures = figures or {}
    problem = str(figures.pop("problem", ""))
    if code > 0 and problem:
        reason = problem
    status = FAILED if reason else PASSED
    if code == NOT_POSSIBLE and problem:
        status = NOT_RUN
    return Outcome(
        name=check.name,
        question=check.question,
        status=status,
        reason=reason[:500],
        seconds=round(seconds, 2),
        figures=figures,
        output=text[-OUTPUT_CHARACTERS:] if status == FAILED else "",
    )


def check_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a check of this package."""
    return (sys.executable, "-u", "-m", "benchmarks.gpu_check.one_check", module, *arguments)


def read_end(path: Path, size: int) -> bytes:
    """Return at most `size` bytes from the end of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read(size)


def _not_run(check: Check, reason: str) -> Outcome:
    return Outcome(name=check.name, question=check.question, status=NOT_RUN, reason=reason)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-code}"


def _end(process: subprocess.Popen[bytes]) -> int:
    """Ask a check to end its jobs, then kill it; return its exit code."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        # A process that hangs inside a driver does not end. The other checks must run nevertheless.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    return -signal.SIGKILL


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _parse_figures(text: str) -> Figures | None:
    """Return the JSON object on the last line, or None if the line is not a JSON object."""
    lines = text.rstrip().splitlines()
    try:
        value: object = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    return {str(name): figure for name, figure in value.items()} if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - JSON
