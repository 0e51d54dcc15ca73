"""What others do about a rank that becomes slow (TrainMover, 8.4), as jobs that really run: for `stragglers.py`.

Each is a job of a hundred steps, driven by somebody who knows at once who is slow: as soon as the first slowed step is
done. Where the way has it so, the job is then stopped by the product's own order, with or without saving, and the same
command starts it again as soon as it has ended, without the slow node.
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
#: steps between the checkpoints of a job that makes none by itself
NEVER = 1_000_000
OURS = "move"
#: what others do
NAMES = ("nothing", "defer-50", "defer-100", "restart-50", "restart-100", "save-and-restart", "per-iteration")
#: at which moment each really runs, where nothing else is asked for; defer-100 does nothing within the hundred
REAL = (
    ("nothing", 70),
    ("defer-50", 20),
    ("restart-50", 70),
    ("restart-100", 20),
    ("save-and-restart", 70),
    ("per-iteration", 70),
)
#: a job of a hundred steps may take so long, in seconds
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Plan:
    """What is done about a rank that becomes slow after step `moment`.

    every: steps between checkpoints. stop_at: at the end of which step the job is stopped; None: it is not.
    saves: whether it is saved as it is stopped.
    """

    moment: int
    every: int = NEVER
    stop_at: int | None = None
    saves: bool = False


def plan(name: str, moment: int) -> Plan:
    """Return what a way does; what does not differ within the hundred steps is the same plan."""
    kind, _, number = name.rpartition("-")
    if kind == "defer":
        at = (moment // int(number) + 1) * int(number)
        return Plan(moment, stop_at=at, saves=True) if at < STEPS else Plan(moment)
    if kind == "restart":
        return Plan(moment, every=int(number) if moment >= int(number) else NEVER, stop_at=moment + 1)
    if name == "save-and-restart":
        return Plan(moment, stop_at=moment + 2, saves=True)
    return Plan(moment, every=1, stop_at=moment + 1) if name == "per-iteration" else Plan(moment)


def plans(moments: Sequence[int] | None) -> dict[Plan, list[str]]:
    """Return what is to run, and for which ways each run stands.

    moments: at which all ways run; None: as `REAL` has it.
    """
    wanted = REAL if moments is None else [(name, moment) for moment in moments for name in NAMES]
    found = dict.fromkeys(plan(name, moment) for name, moment in wanted)
    return {one: [name for name in NAMES if plan(name, one.moment) == one] for one in found}


class Real:
    """Jobs that run as plans have it.

    options: of `holdfast run`, but those of checkpoints and stragglers. args: of the script, without its steps.
    """

    def __init__(self, script: Path, args: Sequence[str], options: Sequence[str], rng: random.Random) -> None:
        self._script = script
        self._args = args
        self._options = options
        self._rng = rng

    def seconds_of_ours(self, moment: int, after_s: float) -> float:
        """Have a standby take the slow node's place; return what `seconds_of` does.

        The hundred steps are some of a job that has trained for so many seconds before.
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
        """Run the hundred steps; return the seconds from the first one's end to the last one's."""
        args = (*self._args, "--steps", str(STEPS))
        with tempfile.TemporaryDirectory(prefix="holdfast-") as name:
            saves = ("--checkpoint-dir", f"{name}/checkpoints", "--checkpoint-every", str(one.every))
            options = (*self._options, "--stragglers", "off", *saves)
            with LocalJob(self._script, args, options=options) as job:
                first = job.wait(StepCommitted)
                job.inject("slow", self._rng.choice(job.nodes()), step=max(one.moment + 1, 3), times=TIMES)
                if one.stop_at is None:
                    return self._end_of(job, first.time) - first.time
                # (the order comes while a step is under way, at whose end the job is saved and ends)
                job.wait(StepCommitted, step=one.stop_at - 1 if one.saves else one.stop_at, timeout=_DEADLINE_S)
                with job.client() as client:
                    client.shutdown(EXIT_ENDED, "a rank is slow", save=one.saves)
                job.wait_exit()
            stopped = job.all(StepCommitted)[-1].time
            # (of what one job's store knows the next knows nothing: it has events of its own, and only the checkpoints)
            with LocalJob(self._script, args, options=options) as job:
                return self._end_of(job, stopped) - first.time

    def _end_of(self, job: LocalJob, since: float) -> float:
        """Wait for the last step after a moment; return when it was done."""
        last = job.wait(StepCommitted, lambda event: event.time > since and event.step == STEPS, timeout=_DEADLINE_S)
        job.wait_exit()
        return last.time
