"""What a worker compares with the others of its role, and when."""

from __future__ import annotations

import pytest

from holdfast.coordination.worker.comparing import COMPARED_STEPS, ReplicaComparison
from holdfast.protocol.fingerprint import Fingerprint


def compared(comparison: ReplicaComparison, step: int, *, state: int = 0) -> Fingerprint:
    """A step begins; return what would be reported of it."""
    comparison.begin(Fingerprint(step=step, settings=1, state=state), lambda: ("lr 0.1",))
    reported = comparison.reported_at(step)
    assert reported is not None
    return reported


@pytest.mark.parametrize("first", [1, 40])
def test_the_state_is_compared_in_the_first_steps_of_each_generation(first: int) -> None:
    comparison = ReplicaComparison()
    comparison.enter(first)
    included = [step for step in range(100) if comparison.includes_state(step)]
    assert included == list(range(first, first + COMPARED_STEPS))


def test_a_received_state_is_compared_from_its_next_step() -> None:
    comparison = ReplicaComparison()
    comparison.enter(1)
    comparison.receive(20)
    assert [step for step in range(100) if comparison.includes_state(step)] == list(range(21, 21 + COMPARED_STEPS))


def test_only_an_equal_state_proves_that_the_received_one_was_right() -> None:
    comparison = ReplicaComparison()
    assert not compared(comparison, 1).received
    comparison.receive(1)
    assert compared(comparison, 2).received
    comparison.agree()
    assert compared(comparison, 3, state=7).received, "until now only settings were compared"
    comparison.agree()
    assert not compared(comparison, 4).received


def test_a_report_has_the_settings_in_words_and_is_of_the_attempt_in_progress() -> None:
    comparison = ReplicaComparison()
    assert comparison.reported_at(1) is None
    assert compared(comparison, 1).shown == ("lr 0.1",)
    assert comparison.reported_at(2) is None
    comparison.differs = True
    comparison.enter(2)
    assert (comparison.fingerprint, comparison.differs) == (None, False)
