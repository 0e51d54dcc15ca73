"""Responses of other systems to a rank that becomes slow (TrainMover, 8.4), as real jobs for `stragglers.py`.

Each is a job of a hundred steps. The driver knows the slow rank as soon as the first slowed step is complete. If the
response requires it, the job is then stopped with holdfast's own command, with or without saving. The same command
starts it again, without the slow node, as soon as it has ended.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import EXIT_ENDED
from holdfast.protocol.events import StandbyReady, StepCommitted
from tests.harness.local_job import LocalJob

STEPS, TIMES = 100, 1.2
#: Checkpoint interval of a job that writes no regular checkpoints.
NEVER = 1_000_000
OURS = "move"
#: Names of the responses of other systems.
NAMES = ("nothing", "defer-50", "defer-100", "restart-50", "restart-100", "save-and-restart", "per-iteration")
#: The moment at which each response really runs by default; defer-100 does nothing within the hundred steps.
REAL = (
    ("nothing", 70),
    ("defer-50", 20),
    ("restart-50", 70),
    ("restart-100", 20),
    ("save-and-restart", 70),
    ("per-iteration", 70),
)
#: Time limit in seconds of a job of a hundred steps.
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Plan:
    """The response to a rank that becomes slow after step `moment`."""

    moment: int
    #: Steps between checkpoints.
    every: int = NEVER
    #: The step at the end of which the job is stopped, or None.
    stop_at: int | None = None
    #: Whether the job is saved when it is stopped.
    saves: bool = False


def plan(name: str, moment: int) -> Plan:
    """Return the plan of a response; responses that do not differ within the hundred steps have the same plan."""
    kind, _, number = name.rpartition("-")
    if kind == "defer":
        at = (moment // int(number) + 1) * int(number)
        return Plan(moment, stop_at=at, saves=True) if at < STEPS else Plan(moment)
    if kind == "restart":
        return Plan(moment, every=int(number) if moment >= int(number) else NEVER, stop_at=moment + 1)
    if name == "save-and-restart":
        return Plan(moment, stop_at=moment + 2, saves=True)
    return Plan(moment, every=1, stop_at=moment + 1) if name == "per-iteration" else Plan(moment)


def plans_to_run(moments: Sequence[int] | None) -> dict[Plan, list[str]]:
    """Return the plans to run, each with the names of its responses.

    moments: at which all responses run; None for the pairs of `REAL`.
    """
    wanted = REAL if moments is None else [(name, moment) for moment in moments for name in NAMES]
    found = dict.fromkeys(plan(name, moment) for name, moment in wanted)
    return {one: [name for name in NAMES if plan(name, one.moment) == one] for one in found}


class RealRuns:
    """Runs jobs according to plans.

    Args:
        script: the training script.
        args: arguments of the script, without its steps.
        options: of `holdfast run`, except for checkpoints and stragglers.
        rng: chooses the slow nodes.
    """

    def __init__(self, script: Path, args: Sequence[str], options: Sequence[str], rng: random.Random) -> None:
        self._script = script
        self._args = args
        self._options = options
        self._rng = rng

    def seconds_of_ours(self, moment: int, after_s: float) -> float:
        """Replace the slow node by a standby; return the seconds of the hundred steps.

        The steps belong to a job that has already trained for `after_s` seconds.
        """
        options = (*self._options, "--stragglers", "move", "--standbys", "1")
        with LocalJob(self._script, (*self._args, "--steps", str(NEVER)), options=options) as job:
            begun = job.wait(StepCommitted).time
            job.wait(StandbyReady)
            before = job.wait(StepCommitted, lambda event: event.time > begun + after_s).step
            job.inject("slow", self._rng.choice(job.nodes()), step=before + max(moment, 2) + 1, times=TIMES)
            last = job.wait(StepCommitted, step=before + STEPS, timeout=_DEADLINE_S)
            return last.time - job.wait(StepCommitted, step=before + 1).time

    def seconds_of(self, one: Plan) -> float:
        """Run the hundred steps; return the seconds from the end of the first to the end of the last."""
        args = (*self._args, "--steps", str(STEPS))
        with tempfile.TemporaryDirectory(prefix="holdfast-") as name:
            saves = ("--checkpoint-dir", f"{name}/checkpoints", "--checkpoint-every", str(one.every))
            options = (*self._options, "--stragglers", "off", *saves)
            with LocalJob(self._script, args, options=options) as job:
                first = job.wait(StepCommitted)
                job.inject("slow", self._rng.choice(job.nodes()), step=max(one.moment + 1, 3), times=TIMES)
                if one.stop_at is None:
                    return self._wait_last_step(job, first.time) - first.time
                # The command arrives during a step. At the end of that step the job is saved and ends.
                job.wait(StepCommitted, step=one.stop_at - 1 if one.saves else one.stop_at, timeout=_DEADLINE_S)
                with job.client() as client:
                    client.shutdown(EXIT_ENDED, "a rank is slow", save=one.saves)
                job.wait_exit()
            stopped = job.all(StepCommitted)[-1].time
            # The next job has its own store and events. It shares only the checkpoints.
            with LocalJob(self._script, args, options=options) as job:
                return self._wait_last_step(job, stopped) - first.time

    def _wait_last_step(self, job: LocalJob, since: float) -> float:
        """Wait for the last step after a moment; return when it was committed."""
        last = job.wait(StepCommitted, lambda event: event.time > since and event.step == STEPS, timeout=_DEADLINE_S)
        job.wait_exit()
        return last.time
