"""Runs checks one after the other, each in its own process, within a total time budget."""

from __future__ import annotations

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
#: Time for a check to end its own child processes after SIGTERM, before SIGKILL.
GRACE_S = 8.0
#: A check starts only if at least this share of its time limit is left of the budget.
LEAST_SHARE = 0.4

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check: a module with a function `run(options, figures)`."""

    name: str
    #: what the check answers, as one sentence
    question: str
    #: seconds after which the check is ended
    limit_s: float
    command: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a check ended."""

    name: str
    question: str
    status: str
    #: why it failed or did not run, in one line
    reason: str = ""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict[str, Any])
    #: the end of the output, if the check failed
    output: str = ""

    @property
    def was_run(self) -> bool:
        """Whether the check has an answer."""
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
    """Run the checks in order and return their outcomes.

    Args:
        folder: for the checks' output.
        on_outcome: called with all outcomes after each check; a text that it returns is the reason not to run the rest.
    """
    deadline = clock() + budget_s
    outcomes: list[Outcome] = []
    stop = ""
    for check in checks:
        left_s = deadline - clock()
        if stop or left_s < LEAST_SHARE * check.limit_s:
            reason = stop or "no time left"
            outcomes.append(Outcome(name=check.name, question=check.question, status=NOT_RUN, reason=reason))
        else:
            limit_s = min(check.limit_s, left_s)
            outcomes.append(run_check(check, limit_s=limit_s, environment=environment, folder=folder))
        stop = on_outcome(outcomes) or stop
    return outcomes


def run_check(check: Check, *, limit_s: float, environment: Mapping[str, str], folder: Path) -> Outcome:
    """Run one check in a process group of its own, and end the whole group."""
    output_file = folder / f"{check.name}.txt"
    began = time.monotonic()
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            check.command, stdout=output, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
        )
    try:
        code = process.wait(limit_s)
        reason = "" if code == 0 else _describe_exit(code)
    except subprocess.TimeoutExpired:
        reason = f"took longer than {limit_s:.0f} s"
        code = _end(process)
    finally:
        _kill_group(process)
    seconds = time.monotonic() - began
    text = output_file.read_text(errors="replace")
    figures = _parse_figures(text)
    if figures is None and not reason:
        reason, figures = "printed no figures", None
    figures = figures or {}
    status = PASSED if not reason else FAILED
    if code == NOT_POSSIBLE:
        status = NOT_RUN
    problem = str(figures.pop("problem", ""))
    if code > 0 and problem:
        reason = problem
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


def _describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> int:
    """Let a check end its jobs; return the exit code of one that has not ended in time."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        process.wait()
    return -signal.SIGKILL


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _parse_figures(text: str) -> Figures | None:
    """Return the JSON object on the last line, or None if there is none."""
    lines = text.rstrip().splitlines()
    try:
        value: object = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return {str(name): figure for name, figure in value.items()} if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - JSON
