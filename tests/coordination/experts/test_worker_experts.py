"""Tests of the experts a worker holds across generations: it releases none before a commit operation has passed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.experts.blobs import decode_experts, encode_all_experts, encode_experts, find_lost_experts
from holdfast.coordination.experts.worker_experts import HeldExperts
from holdfast.errors import JobFailedError
from holdfast.planning.arrays import IntArray
from holdfast.protocol.plan import DecisionKind, ExpertPlan, ExpertShape

LAYERS, EXPERTS = 2, 4
SHAPE = ExpertShape(layers=LAYERS, experts=EXPERTS, slots=EXPERTS)
START, REDO, ROLLBACK = DecisionKind.START, DecisionKind.REDO, DecisionKind.ROLLBACK


def blob(*experts: int) -> bytes:
    """Return one worker's experts, the same in both layers."""
    return encode_experts(np.tile(np.bincount(experts, minlength=EXPERTS), (LAYERS, 1)))


def plan(held: bytes, placement: bytes, moves: int = 0) -> ExpertPlan:
    """Return the part of a plan that concerns rank 0."""
    return ExpertPlan(
        layers=LAYERS, experts=EXPERTS, held=(held,), placement=(placement,), moves=moves, asked=1, given=1
    )


def holding(*experts: int) -> HeldExperts:
    """Return the state of a worker that has held these experts since a commit."""
    out = HeldExperts(SHAPE)
    out.apply_placement(plan(b"", blob(*experts)), 0, START)
    out.on_committed()
    return out


def test_all_initial_experts_are_kept_until_the_first_commit() -> None:
    fresh = HeldExperts(SHAPE)
    assert fresh.blob == encode_all_experts(SHAPE) == blob(0, 1, 2, 3)
    change = fresh.apply_placement(plan(b"", blob(0, 1)), 0, START)
    assert not change.fetch
    assert encode_experts(change.keep) == encode_all_experts(SHAPE)
    fresh.on_received()
    assert (fresh.blob, fresh.next_blob, fresh.initial) == (encode_all_experts(SHAPE), blob(0, 1), True)
    fresh.on_committed()
    assert (fresh.blob, fresh.next_blob, fresh.initial) == (blob(0, 1), blob(0, 1), False)


def test_a_migration_keeps_the_held_experts_until_a_commit() -> None:
    worker = holding(0, 1)
    change = worker.apply_placement(plan(blob(0, 1), blob(1, 2), moves=2), 0, REDO)
    assert change.fetch
    assert worker.blob == blob(0, 1) == encode_experts(change.keep), "experts in transfer are not held yet"
    worker.on_received()
    assert (worker.blob, worker.next_blob) == (blob(0, 1, 2), blob(1, 2))
    worker.on_committed()
    assert worker.blob == blob(1, 2)


def test_received_experts_that_the_next_plan_does_not_know_are_released() -> None:
    """A Stop comes after a migration but before it is recorded: the next plan knows only the experts held before."""
    worker = holding(0, 1)
    worker.apply_placement(plan(blob(0, 1), blob(1, 2), moves=2), 0, REDO)
    worker.on_received()
    change = worker.apply_placement(plan(blob(0, 1), blob(0)), 0, REDO)
    assert encode_experts(change.keep) == worker.blob == blob(0, 1)


def test_experts_transferred_during_a_step_are_held_once_received() -> None:
    worker = holding(0, 1)
    beside = msgspec.structs.replace(plan(blob(0, 1), blob(1, 2), moves=2), beside=True)
    change = worker.apply_placement(beside, 0, None)
    assert (change.fetch, change.during_step, change.serving) == (True, True, beside.held)
    assert (worker.is_complete, worker.blob, worker.next_blob) == (False, blob(0, 1), blob(1, 2))
    worker.on_received()
    assert (worker.is_complete, worker.blob) == (True, blob(0, 1, 2))
    worker.on_committed()
    assert worker.blob == blob(1, 2)


def test_no_experts_are_transferred_during_a_step_after_a_failure() -> None:
    worker = holding(0, 1)
    beside = msgspec.structs.replace(plan(blob(0, 1), blob(1, 2), moves=2), beside=True)
    change = worker.apply_placement(beside, 0, REDO)
    assert (change.fetch, change.during_step, change.serving) == (True, False, beside.placement)


@pytest.mark.parametrize("decision", [REDO, DecisionKind.FORWARD, None])
def test_experts_of_a_replaced_state_are_not_kept(decision: DecisionKind | None) -> None:
    worker = HeldExperts(SHAPE)
    change = worker.apply_placement(plan(b"", blob(1, 2), moves=2), 0, decision)
    assert change.fetch
    assert not change.keep.any()
    assert not worker.initial
    worker.on_received()
    assert worker.blob == blob(1, 2)


def test_a_loaded_checkpoint_replaces_the_held_experts() -> None:
    worker = holding(0, 1)
    worker.mark_overwritten()
    worker.on_loaded(plan(b"", blob(2, 3)), 0)
    assert worker.blob == blob(2, 3)
    change = worker.apply_placement(plan(b"", blob(2, 3)), 0, ROLLBACK)
    assert (encode_experts(change.keep), change.fetch) == (blob(2, 3), False)


def test_overwritten_initial_experts_cannot_start_a_job() -> None:
    for worker in (holding(0, 1, 2, 3), HeldExperts(SHAPE)):
        worker.mark_overwritten()
        with pytest.raises(JobFailedError, match="initial experts"):
            worker.apply_placement(plan(b"", encode_all_experts(SHAPE)), 0, START)


def test_a_plan_that_assumes_experts_not_held_is_refused() -> None:
    with pytest.raises(ValueError, match="this worker holds"):
        holding(0, 2).apply_placement(plan(blob(0, 1), blob(0, 1)), 0, REDO)
    with pytest.raises(ValueError, match="moves nothing"):
        holding(0, 2).apply_placement(plan(blob(0, 2), blob(0, 1)), 0, REDO)


class Member:
    """A worker and the actual content of its memory, independent of its records."""

    def __init__(self) -> None:
        self.holding = HeldExperts(SHAPE)
        self.memory = decode_experts(encode_all_experts(SHAPE), SHAPE) > 0

    def take_up(self, plan: ExpertPlan, rank: int, decision: DecisionKind | None, reach: int) -> None:
        """Apply a plan up to a stage: 1 dropped experts are freed, 2 missing ones received, 3 recorded."""
        if reach == 0:
            return
        change = self.holding.apply_placement(plan, rank, decision)
        self.check()
        self.memory &= change.keep > 0
        if reach > 1:
            self.memory |= self.holding.placed > 0
        if reach > 2:
            self.holding.on_received()
        self.check()

    def commit(self) -> None:
        self.memory &= self.holding.placed > 0
        self.holding.on_committed()
        self.check()

    def check(self) -> None:
        assert not ((self.holding.held > 0) & ~self.memory).any(), "the records name experts that are not in memory"


def placements(ranks: int) -> st.SearchStrategy[list[bytes]]:
    """Generate placements with every expert of every layer on at least one rank."""
    hosts = st.sets(st.integers(0, ranks - 1), min_size=1)
    return st.lists(hosts, min_size=LAYERS * EXPERTS, max_size=LAYERS * EXPERTS).map(
        lambda hosted: [
            encode_experts(np.array([rank in who for who in hosted], dtype=np.int64).reshape(LAYERS, EXPERTS))
            for rank in range(ranks)
        ]
    )


def next_plan(held: Sequence[bytes], placement: Sequence[bytes]) -> ExpertPlan:
    missing = [
        _missing(decode_experts(have, SHAPE), decode_experts(want, SHAPE))
        for have, want in zip(held, placement, strict=True)
    ]
    moves = sum(missing) if any(held) else 0
    return ExpertPlan(
        layers=LAYERS, experts=EXPERTS, held=tuple(held), placement=tuple(placement), moves=moves, asked=1, given=1
    )


def _missing(have: IntArray, want: IntArray) -> int:
    return int(((want > 0) & (have == 0)).sum())


@settings(max_examples=150, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4))
def test_no_expert_is_lost_if_a_generation_is_interrupted_at_any_point(data: st.DataObject, ranks: int) -> None:
    """Members report, apply plans made from their reports, and are stopped at any point."""
    members = [Member() for _ in range(ranks)]
    held, decision = [b""] * ranks, START
    for _ in range(data.draw(st.integers(1, 6))):
        plan = next_plan(held, data.draw(placements(ranks)))
        reach = data.draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks) | st.just([3] * ranks))
        if plan.moves and min(reach) == 0:
            reach = [min(far, 1) for far in reach]  # either all take part in the migration or no expert arrives
        for rank, member in enumerate(members):
            member.take_up(plan, rank, decision, reach[rank])
        passed = min(reach) == 3 and data.draw(st.booleans())
        late = [data.draw(st.booleans()) if passed else False for _ in members]
        for member, is_late in zip(members, late, strict=True):
            if passed and not is_late:
                member.commit()
        # FORWARD: a worker stopped before it applied reports the experts it will hold, and applies the step first.
        held = [m.holding.next_blob if is_late else m.holding.blob for m, is_late in zip(members, late, strict=True)]
        assert find_lost_experts(SHAPE, held) == []
        for member, is_late in zip(members, late, strict=True):
            if is_late:
                member.commit()
        decision = REDO
