"""Tests of the fingerprints that a worker compares with others of its role, and when."""

from __future__ import annotations

import pytest

from holdfast.coordination.worker.comparison import COMPARED_STEPS, ReplicaComparison
from holdfast.protocol.fingerprint import Fingerprint


def compared(comparison: ReplicaComparison, step: int, *, state: int = 0) -> Fingerprint:
    """Begin a step; return the fingerprint that would be reported."""
    comparison.set_fingerprint(Fingerprint(step=step, settings=1, state=state), lambda: ("lr 0.1",))
    reported = comparison.reported_fingerprint(step)
    assert reported is not None
    return reported


@pytest.mark.parametrize("first", [1, 40])
def test_the_state_is_compared_in_the_first_steps_of_each_generation(first: int) -> None:
    comparison = ReplicaComparison()
    comparison.enter_generation(first)
    included = [step for step in range(100) if comparison.includes_state(step)]
    assert included == list(range(first, first + COMPARED_STEPS))


def test_a_received_state_is_compared_from_its_next_step() -> None:
    comparison = ReplicaComparison()
    comparison.enter_generation(1)
    comparison.record_received_state(20)
    assert [step for step in range(100) if comparison.includes_state(step)] == list(range(21, 21 + COMPARED_STEPS))


def test_only_a_compared_equal_state_confirms_the_received_state() -> None:
    comparison = ReplicaComparison()
    assert not compared(comparison, 1).received
    comparison.record_received_state(1)
    assert compared(comparison, 2).received
    comparison.record_agreement()
    assert compared(comparison, 3, state=7).received, "so far only settings were compared"
    comparison.record_agreement()
    assert not compared(comparison, 4).received


def test_a_fingerprint_includes_readable_settings_and_covers_the_current_attempt() -> None:
    comparison = ReplicaComparison()
    assert comparison.reported_fingerprint(1) is None
    assert compared(comparison, 1).shown == ("lr 0.1",)
    assert comparison.reported_fingerprint(2) is None
    comparison.differs = True
    comparison.enter_generation(2)
    assert (comparison.fingerprint, comparison.differs) == (None, False)
