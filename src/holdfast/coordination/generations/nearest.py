"""The source of state without a live copy: the newest snapshot, unless a checkpoint is newer."""

from __future__ import annotations

from holdfast.coordination.generations.decisions import NothingLeft, Verdict
from holdfast.protocol.plan import Decision, DecisionKind
from holdfast.protocol.state import SnapshotSource


def nearest(verdict: Verdict | NothingLeft, snapshot: SnapshotSource | None, committed: int) -> Verdict | NothingLeft:
    """Return the verdict, changed to a rollback to the snapshot if it would go back further.

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
    held = f"the snapshot of step {snapshot.step} serves, in the memory of {_names(snapshot)}"
    why = f"{verdict.lost} have no live copy: {held}"
    if back := committed - snapshot.step:
        why = f"{why}; {back} committed {'step is' if back == 1 else 'steps are'} done again"
    decision = Decision(kind=DecisionKind.ROLLBACK, applied=snapshot.step, source=snapshot)
    return Verdict(decision=decision, holders=(), why=why)


def _names(snapshot: SnapshotSource, most: int = 8) -> str:
    names = sorted(keeper.node for keeper in snapshot.keepers)
    told = ", ".join(names[:most])
    return f"{told} and {len(names) - most} more" if len(names) > most else told
