"""What becomes of an interrupted step, from the survivors' reports alone (DESIGN.md 3.1).

The newest step that every part of the state can reach: FORWARD(k, v) if any reporter passed or applied k, is READY with
v of k (with experts only where all are), or an earlier generation decided FORWARD(k); REDO if nobody has to apply
anything. ROLLBACK if no step from the announced one on can be reached. Pure: the same reports give the same verdict,
whoever asks and however often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from holdfast.coordination.roles import every_role, only_whole, whole_units
from holdfast.protocol.commit import Commit, have_same_lanes
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.plan import Decision, DecisionKind
from holdfast.protocol.record import KnownCheckpoint, Record
from holdfast.protocol.state import CheckpointSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A decision and the workers that can carry it out without being sent state, in the reports' order.

    `why`, for people: what is lost, where the job rolls back; `lost`: its name.
    """

    decision: Decision
    holders: tuple[str, ...]
    why: str = field(default="", compare=False)
    lost: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingLeft:
    """No live copy of the state, and no checkpoint: the job is lost; `why` says what of it, `lost` names that."""

    why: str
    lost: str = field(default="", compare=False)


def what_counts(record: Record, reports: Mapping[str, Report]) -> dict[str, Report]:
    """Return reports without what workers that are owed have reduced, unless it was decided to finish that step.

    The others do the step anew: with both results of it the replicas would differ.
    """
    decision, owed = record.decision, {worker for one in record.leaving for worker in one.owed}
    finished = decision.applied if decision is not None and decision.kind is DecisionKind.FORWARD else 0
    return {
        worker: replace(report, reduced=None, result=None) if worker in owed and report.step != finished else report
        for worker, report in reports.items()
    }


#: Returns the (layer, expert) pairs that would be lost by a verdict.
Lost = Callable[[Verdict], Sequence[tuple[int, int]]]


def decide(
    previous: Decision | None,
    committed: int,
    reports: Sequence[Report],
    checkpoints: Sequence[KnownCheckpoint],
    arrivals: Sequence[str] = (),
    *,
    lost: Lost | None = None,
    away: Sequence[tuple[int, int]] = (),
    anew: bool = False,
    unreadable: int = 0,
    places: int = 1,
) -> Verdict | NothingLeft:
    """Decide from the reports of all members that were not expelled, of whole units.

    Args:
        previous: the decision that the interrupted generation began with; a FORWARD of it that is not yet applied by
            all is inherited.
        committed: the newest step known to be applied by every member.
        reports: one per surviving member.
        checkpoints: on the decided lineage, oldest first, intact as far as is known.
        arrivals: workers that were in no generation yet.
        lost: which experts a verdict would lose; None for a dense model, whose state is whole on each worker.
        away: experts of a state that was put away, on nodes that are away.
        anew, unreadable, places: as `without_state`.
    """
    carriers = [report for report in reports if report.applied is not None]
    if not carriers:
        fresh = [report.worker for report in reports if report.fresh]
        fresh += arrivals
        return without_state(committed, checkpoints, fresh, away, anew=anew, unreadable=unreadable, places=places)
    missing: Sequence[tuple[int, int]] = ()
    for verdict in _reachable(previous, committed, carriers, dense=lost is None, places=places):
        lacking = lost(verdict) if lost is not None else ()
        if not lacking:
            return verdict
        missing = missing or lacking  # (what is lost of the newest step)
    return without_state(committed, checkpoints, [], missing, anew=anew, unreadable=unreadable)


def _reachable(
    previous: Decision | None, committed: int, carriers: Sequence[Report], *, dense: bool, places: int
) -> Iterator[Verdict]:
    """Yield what can be decided, newest step first: what was passed, perhaps, down to what is announced.

    Each role needs somebody who can come to it: those who stand there, and of the others whole units alone. A unit in
    which only some can finish a step that nobody has passed goes on from the state before, with all that it has of the
    step, until the newer one has come from elsewhere. Else it would have neither, were they lost that send it.
    """
    known = _known_v(previous, carriers, dense=dense)
    there = {report.applied for report in carriers if report.applied is not None}
    passed = there | {report.passed.step for report in carriers if report.passed is not None}
    if previous is not None and previous.kind is DecisionKind.FORWARD:
        passed.add(previous.applied)
    at_last: list[Verdict] = []
    for step in sorted((step for step in known.keys() | there if step >= committed), reverse=True):
        commit = known.get(step)
        able = [report for report in carriers if _can_reach(report, step, commit)]
        whole = set(only_whole([report.worker for report in able], places))
        firm = [report for report in able if report.worker in whole or report.applied == step]
        if every_role([report.worker for report in firm], places):
            yield _verdict(step, commit, firm)
        elif every_role([report.worker for report in able], places):
            if step in passed:
                yield _verdict(step, commit, able)
            else:
                at_last.append(_verdict(step, commit, able))
    yield from at_last


def _verdict(step: int, commit: Commit | None, holders: Sequence[Report]) -> Verdict:
    forward = any(report.applied != step for report in holders)
    kind = DecisionKind.FORWARD if forward else DecisionKind.REDO
    decision = Decision(kind=kind, applied=step, commit=commit if forward else None)
    return Verdict(decision=decision, holders=tuple(report.worker for report in holders))


def without_state(
    committed: int,
    checkpoints: Sequence[KnownCheckpoint],
    fresh: Sequence[str],
    lost: Sequence[tuple[int, int]] = (),
    *,
    anew: bool = False,
    unreadable: int = 0,
    places: int = 1,
) -> Verdict | NothingLeft:
    """Decide where some state has no live copy: begin anew, go back to the newest checkpoint, or give up.

    Args:
        fresh: workers whose initial state is whole; the first unit's becomes everybody's where nothing is lost. Where
            there is none (a transfer was torn), START has no holder: the workers have to begin afresh.
        lost: (layer, expert) of what is lost; none means that everything is.
        anew: without a checkpoint the job begins from its start, whatever that loses.
        places: so many workers have a replica of the model between them.
        unreadable: how many checkpoints there were that cannot be read.
    """
    if checkpoints:
        newest = checkpoints[-1]
        rollback = Decision(kind=DecisionKind.ROLLBACK, applied=newest.step, source=CheckpointSource(name=newest.name))
        return Verdict(decision=rollback, holders=(), why=f"{_names(lost)} have no live copy", lost=_names(lost))
    if committed == 0 or anew:
        why = f"{_names(lost)} have no live copy and no checkpoint is kept yet: the job begins anew"
        start, first = Decision(kind=DecisionKind.START, applied=0), next(iter(whole_units(fresh, places)), ())
        return Verdict(decision=start, holders=first, why=why if committed else "", lost=_names(lost))
    what = f"{_names(lost)} of step {committed} have no live copy"
    if unreadable:
        why = f"{what} and no checkpoint can be read ({unreadable} could not): {committed} committed steps are lost"
        return NothingLeft(why=why, lost=_names(lost))
    return NothingLeft(
        why=f"{what} and there is no checkpoint: {committed} committed steps are lost "
        "(give --checkpoint-dir DIR to keep some)",
        lost=_names(lost),
    )


def _names(lost: Sequence[tuple[int, int]], most: int = 8) -> str:
    if not lost:
        return "parameters and optimizer state"
    names = ", ".join(f"expert {expert} of MoE layer {layer}" for layer, expert in lost[:most])
    return f"{names} and {len(lost) - most} more" if len(lost) > most else names


def _known_v(previous: Decision | None, carriers: Sequence[Report], *, dense: bool) -> dict[int, Commit]:
    """Return v of the steps that are to be finished where that can be, by step.

    Its flags are those of somebody who has passed, else none: what is raised counts only once all have.
    """
    known: dict[int, Commit] = {}
    for report in carriers:
        if report.reduced is None:
            continue
        if dense or all(other.holding_of(report.step) is not None for other in carriers):
            known[report.step] = report.reduced
    if previous is not None and previous.kind is DecisionKind.FORWARD and previous.commit is not None:
        known[previous.applied] = previous.commit
    for report in carriers:
        if report.passed is not None:
            known[report.passed.step] = report.passed.commit
    return known


def _can_reach(report: Report, step: int, commit: Commit | None) -> bool:
    """True where the worker has the state of `step`, or the reduced gradients that lead there by this v."""
    holding = report.holding_of(step)
    if holding is None or not holding.dense:
        return False
    if report.applied == step:
        return True
    return commit is not None and report.reduced is not None and have_same_lanes(report.reduced, commit)
