"""What becomes of an interrupted step, from the survivors' reports alone (DESIGN.md 3.1).

ROLLBACK if some state has no live copy; FORWARD(k, v) if any reporter passed or applied k, or an earlier generation
decided FORWARD(k); else REDO. Pure: the same reports give the same verdict, whoever asks and however often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.protocol.commit import Commit
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.plan import Decision, DecisionKind, Passed
from holdfast.protocol.record import KnownCheckpoint
from holdfast.protocol.state import CheckpointSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A decision and the workers that can carry it out without being sent state, in the reports' order.

    `why`, for people: what is lost, where the job rolls back.
    """

    decision: Decision
    holders: tuple[str, ...]
    why: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingLeft:
    """No live copy of the state, and no checkpoint: the job is lost; `why` says what of it."""

    why: str


def decide(
    previous: Decision | None,
    committed: int,
    reports: Sequence[Report],
    checkpoints: Sequence[KnownCheckpoint],
    arrivals: Sequence[str] = (),
    *,
    anew: bool = False,
    unreadable: int = 0,
) -> Verdict | NothingLeft:
    """Decide from the reports of all members that were not expelled.

    Args:
        previous: the decision that the interrupted generation began with; a FORWARD of it that is not yet applied by
            all is inherited.
        committed: the newest step known to be applied by every member.
        reports: one per surviving member.
        checkpoints: on the decided lineage, oldest first, intact as far as is known.
        arrivals: workers that were in no generation yet.
        anew, unreadable: as `without_state`.
    """
    carriers = [report for report in reports if report.applied is not None]
    if not carriers:
        fresh = [report.worker for report in reports if report.fresh]
        return without_state(committed, checkpoints, [*fresh, *arrivals], anew=anew, unreadable=unreadable)
    passed = _newest_passed(previous, reports)
    top = max(report.applied or 0 for report in carriers)
    target = max(top, passed.step) if passed else top
    commit = passed.commit if passed is not None and passed.step == target else None
    holders = [report for report in carriers if _can_reach(report, target, commit)]
    if not holders:
        return without_state(committed, checkpoints, [], anew=anew, unreadable=unreadable)
    workers = tuple(report.worker for report in holders)
    if any(report.applied != target for report in holders):
        forward = Decision(kind=DecisionKind.FORWARD, applied=target, commit=commit)
        return Verdict(decision=forward, holders=workers)
    return Verdict(decision=Decision(kind=DecisionKind.REDO, applied=target), holders=workers)


def without_state(
    committed: int,
    checkpoints: Sequence[KnownCheckpoint],
    fresh: Sequence[str],
    lost: Sequence[tuple[int, int]] = (),
    *,
    anew: bool = False,
    unreadable: int = 0,
) -> Verdict | NothingLeft:
    """Decide where some state has no live copy: begin anew, go back to the newest checkpoint, or give up.

    Args:
        fresh: workers whose initial state is whole; the first one's becomes everybody's where nothing is lost. Where
            there is none (a transfer was torn), START has no holder: the workers have to begin afresh.
        lost: (layer, expert) of what is lost; none means that everything is.
        anew: without a checkpoint the job begins from its start, whatever that loses.
        unreadable: how many checkpoints there were that cannot be read.
    """
    if checkpoints:
        newest = checkpoints[-1]
        rollback = Decision(kind=DecisionKind.ROLLBACK, applied=newest.step, source=CheckpointSource(name=newest.name))
        return Verdict(decision=rollback, holders=(), why=f"{_names(lost)} have no live copy")
    if committed == 0 or anew:
        why = f"{_names(lost)} have no live copy and no checkpoint is kept yet: the job begins anew"
        start = Decision(kind=DecisionKind.START, applied=0)
        return Verdict(decision=start, holders=tuple(fresh[:1]), why=why if committed else "")
    what = f"{_names(lost)} of step {committed} have no live copy"
    if unreadable:
        why = f"{what} and no checkpoint can be read ({unreadable} could not): {committed} committed steps are lost"
        return NothingLeft(why=why)
    return NothingLeft(
        why=f"{what} and there is no checkpoint: {committed} committed steps are lost "
        "(give --checkpoint-dir DIR to keep some)"
    )


def _names(lost: Sequence[tuple[int, int]], most: int = 8) -> str:
    if not lost:
        return "parameters and optimizer state"
    names = ", ".join(f"expert {expert} of MoE layer {layer}" for layer, expert in lost[:most])
    return f"{names} and {len(lost) - most} more" if len(lost) > most else names


def _newest_passed(previous: Decision | None, reports: Sequence[Report]) -> Passed | None:
    known = [report.passed for report in reports if report.passed is not None]
    if previous is not None and previous.kind is DecisionKind.FORWARD and previous.commit is not None:
        known.append(Passed(step=previous.applied, commit=previous.commit))
    return max(known, key=lambda passed: passed.step, default=None)


def _can_reach(report: Report, target: int, commit: Commit | None) -> bool:
    """True where the worker has the state of `target`, or the reduced gradients that lead there, and v is known."""
    holding = report.holding_of(target)
    return holding is not None and holding.dense and (report.applied == target or commit is not None)
