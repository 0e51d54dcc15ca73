"""What workers compare in each step: all come to the same result from the same sums."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.fingerprint import MAX_BITS, Fingerprint, find_unequal_roles, fingerprint_contribution


def sums(settings: Sequence[int], *, places: int = 1, step: int = 3, state: int = 0) -> list[float]:
    """Return the sums of workers with these settings, by rank."""
    world = len(settings)
    rows = [
        fingerprint_contribution(Fingerprint(step=step, settings=one, state=state), rank % places, places, world)
        for rank, one in enumerate(settings)
    ]
    return [sum(column) for column in zip(*rows, strict=True)]


@given(st.lists(st.integers(0, (1 << 62) - 1), min_size=1, max_size=4), st.integers(1, 2000), st.integers(1, 1 << 40))
def test_one_different_fingerprint_is_detected(values: list[int], workers: int, step: int) -> None:
    same = [values[0]] * workers
    assert find_unequal_roles(sums(same, step=step), workers) == ()
    other = [*same, values[0] ^ 1]
    # A hash of 20 bits misses one difference in a million at one step, and not at the next.
    assert any(find_unequal_roles(sums(other, step=step + later), workers + 1) for later in range(3))


@pytest.mark.parametrize("workers", [1, 2, 8191, 8192, 8193, 30_000])
def test_sums_of_many_workers_are_exact(workers: int) -> None:
    row = fingerprint_contribution(Fingerprint(step=1, settings=(1 << 62) - 1), 0, 1, workers)
    assert row[0] < 1 << MAX_BITS
    assert row[1] * workers <= 2.0**53
    assert find_unequal_roles([row[0] * workers, row[1] * workers], workers) == ()
    assert find_unequal_roles([row[0] * workers + 1, row[1] * workers], workers) == (0,)


def test_each_role_is_compared_separately() -> None:
    assert find_unequal_roles(sums([1, 2, 1, 2, 1, 2], places=2), 6) == ()
    assert find_unequal_roles(sums([1, 2, 1, 3, 1, 2], places=2), 6) == (1,)
    assert find_unequal_roles(sums([1, 2, 4, 3, 1, 2], places=2), 6) == (0, 1)


def test_step_state_and_version_are_compared() -> None:
    row = [
        fingerprint_contribution(one, 0, 1, 2)
        for one in (
            Fingerprint(step=1, settings=5),
            Fingerprint(step=2, settings=5),
            Fingerprint(step=1, settings=5, state=7),
            Fingerprint(step=1, settings=5, version=2),
        )
    ]
    assert len({tuple(one) for one in row}) == 4


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.5])
def test_invalid_sums_count_as_unequal(wrong: float) -> None:
    assert find_unequal_roles([wrong, 1.0], 2) == (0,)
