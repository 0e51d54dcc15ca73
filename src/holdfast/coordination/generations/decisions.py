"""The decision about an interrupted step, from the survivors' reports alone (DESIGN.md 3.1).

It leads to the newest step that every part of the state can reach. FORWARD(k, v) if a reporter passed or applied k, is
READY with v of k (with experts: if all are), or an earlier generation decided FORWARD(k). REDO if no member must apply
anything. ROLLBACK if no step from the committed one on can be reached. Pure: the same reports always give the same
verdict.
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
from holdfast.protocol.state import CheckpointSource, SnapshotSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A decision, and the workers that can execute it without receiving state, in the order of their reports."""

    decision: Decision
    holders: tuple[str, ...]
    #: The reason of a rollback, for users.
    why: str = field(default="", compare=False)
    #: The lost state, for users.
    lost: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingLeft:
    """The state has no live copy and no checkpoint: the job has failed."""

    #: The reason, for users.
    why: str
    #: The lost state, for users.
    lost: str = field(default="", compare=False)


def what_counts(record: Record, reports: Mapping[str, Report]) -> dict[str, Report]:
    """Return the reports, but without retained workers' reductions, unless that step was decided to be
    finished.

    The others repeat the step: with both results of it the replicas would differ.
    """
    decision, owed = record.decision, {worker for one in record.leaving for worker in one.owed}
    finished = decision.applied if decision is not None and decision.kind is DecisionKind.FORWARD else 0
    return {
        worker: replace(report, reduced=None, result=None) if worker in owed and report.step != finished else report
        for worker, report in reports.items()
    }


#: Returns the (layer, expert) pairs that a verdict would lose.
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
    """Decide how a job continues from the reports of all members that were not expelled, in complete replica groups.

    The answer is the newest step, from the committed one on, that every role and all experts can reach; else
    `without_state`.

    Args:
        previous: the decision with which the interrupted generation began. Its FORWARD is inherited until all have
            applied it.
        committed: the newest step known to be applied by every member.
        reports: one per surviving member.
        checkpoints: intact ones on the decided lineage, oldest first.
        arrivals: workers that were in no generation yet.
        lost: returns the experts that a verdict would lose; None for a dense model, because each worker has its full
            state.
        away: experts of a stashed state on disconnected nodes.
        anew: as in `without_state`.
        unreadable: as in `without_state`.
        places: as in `without_state`.
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
        # Report the losses of the newest step.
        missing = missing or lacking
    return without_state(committed, checkpoints, [], missing, anew=anew, unreadable=unreadable)


def _reachable(
    previous: Decision | None, committed: int, carriers: Sequence[Report], *, dense: bool, places: int
) -> Iterator[Verdict]:
    """Yield the possible verdicts, newest step first, down to the committed step.

    Each role needs a worker that can reach the step: one that has applied it, or one in a complete replica group that
    can apply it. In some groups only a part of the workers can finish a step that none has passed. Such a group
    continues from the state before, with its sums, until the newer state has arrived. Otherwise it would have neither
    if the senders were lost.
    """
    known = _known_results(previous, carriers, dense=dense)
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
    """Return the verdict that continues from a step: FORWARD if one of the holders must apply it first, else REDO."""
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
    """Decide if some state has no live copy: roll back to the newest checkpoint, restart from step 0, or give up.

    A restart is possible if no step is committed, or if `anew`.

    Args:
        checkpoints: intact ones, oldest first.
        fresh: workers with an intact initial state. All use the state of the first complete group. If there is none (an
            interrupted transfer), START has no holder, and all workers must restart.
        lost: the lost (layer, expert) pairs; empty means that everything is lost.
        anew: without a checkpoint the job restarts from step 0, even if progress is lost.
        places: the number of workers in a replica group.
        unreadable: the number of checkpoints that could not be read.
    """
    if checkpoints:
        newest = checkpoints[-1]
        rollback = Decision(kind=DecisionKind.ROLLBACK, applied=newest.step, source=CheckpointSource(name=newest.name))
        return Verdict(decision=rollback, holders=(), why=f"{_names(lost)} have no live copy", lost=_names(lost))
    if committed == 0 or anew:
        why = f"{_names(lost)} have no live copy and no checkpoint is kept yet: the job restarts from step 0"
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
    """Return the lost experts in words, at most `most` by name; without any, everything is lost."""
    if not lost:
        return "parameters and optimizer state"
    names = ", ".join(f"expert {expert} of MoE layer {layer}" for layer, expert in lost[:most])
    return f"{names} and {len(lost) - most} more" if len(lost) > most else names


def _known_results(previous: Decision | None, carriers: Sequence[Report], *, dense: bool) -> dict[int, Commit]:
    """Return the known step results, by step, from reports and an inherited FORWARD.

    With experts, the result of a step that no worker has passed counts only if all have their expert parts of it. The
    flags come from a worker that has passed the step. Otherwise all are down, because a flag counts only if all have
    raised it.
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
    """Return whether a worker has the state of `step`, or reduced gradients that lead to it with this result.

    A worker without the dense part of that state cannot.
    """
    holding = report.holding_of(step)
    if holding is None or not holding.dense:
        return False
    if report.applied == step:
        return True
    return commit is not None and report.reduced is not None and have_same_lanes(report.reduced, commit)


def prefer_snapshot(
    verdict: Verdict | NothingLeft, snapshot: SnapshotSource | None, committed: int
) -> Verdict | NothingLeft:
    """Return a rollback to the snapshot instead of a verdict that would lose more: an older checkpoint, a start, or
    nothing left.

    Without a snapshot, or if the verdict keeps a live or newer state, it is returned unchanged.

    Args:
        snapshot: the newest usable snapshot, or None.
        committed: the newest committed step.
    """
    if snapshot is None:
        return verdict
    if isinstance(verdict, Verdict):
        live = verdict.decision.kind in (DecisionKind.REDO, DecisionKind.FORWARD)
        if live or verdict.decision.applied > snapshot.step:
            return verdict
    held = f"the snapshot of step {snapshot.step} serves, in the memory of {_keeper_names(snapshot)}"
    why = f"{verdict.lost} have no live copy: {held}"
    if back := committed - snapshot.step:
        why = f"{why}; {back} committed {'step is' if back == 1 else 'steps are'} done again"
    decision = Decision(kind=DecisionKind.ROLLBACK, applied=snapshot.step, source=snapshot)
    return Verdict(decision=decision, holders=(), why=why)


def _keeper_names(snapshot: SnapshotSource, most: int = 8) -> str:
    """Return the names of the nodes that keep a snapshot, at most `most`, and the number of others."""
    names = sorted(keeper.node for keeper in snapshot.keepers)
    told = ", ".join(names[:most])
    return f"{told} and {len(names) - most} more" if len(names) > most else told
