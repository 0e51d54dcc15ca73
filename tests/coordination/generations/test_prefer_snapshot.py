from __future__ import annotations

import pytest

from holdfast.coordination.generations.decisions import NothingLeft, Verdict, prefer_snapshot, without_state
from holdfast.protocol.plan import Decision, DecisionKind
from holdfast.protocol.record import KnownCheckpoint
from holdfast.protocol.state import CheckpointSource, Keeper, SnapshotSource

SNAPSHOT = SnapshotSource(
    term=1,
    generation=1,
    step=40,
    seal=b"s" * 16,
    keepers=(Keeper(node="a", host="h", port=1), Keeper(node="b", host="h", port=1)),
    parts=((0,), (1,)),
)


def lost(*checkpoints: int) -> Verdict | NothingLeft:
    known = [KnownCheckpoint(step=step, name=f"c{step}") for step in checkpoints]
    return without_state(43, known, [])


@pytest.mark.parametrize("checkpoints", [(), (10, 20), (40,)])
def test_a_snapshot_is_used_if_no_checkpoint_is_newer(checkpoints: tuple[int, ...]) -> None:
    verdict = prefer_snapshot(lost(*checkpoints), SNAPSHOT, 43)
    assert isinstance(verdict, Verdict)
    assert verdict.decision == Decision(kind=DecisionKind.ROLLBACK, applied=40, source=SNAPSHOT)
    assert verdict.holders == ()
    assert verdict.why == (
        "parameters and optimizer state have no live copy: the snapshot of step 40 serves, in the memory of a, b; "
        "3 committed steps are done again"
    )


def test_a_newer_checkpoint_is_preferred_to_a_snapshot() -> None:
    verdict = prefer_snapshot(lost(42), SNAPSHOT, 43)
    assert isinstance(verdict, Verdict)
    assert verdict.decision.source == CheckpointSource(name="c42")


def test_the_verdict_is_unchanged_with_a_live_copy_or_without_a_snapshot() -> None:
    live = Verdict(decision=Decision(kind=DecisionKind.REDO, applied=39), holders=("w",))
    assert prefer_snapshot(live, SNAPSHOT, 39) is live
    nothing = lost()
    assert isinstance(nothing, NothingLeft)
    assert prefer_snapshot(nothing, None, 43) is nothing
