"""Tests of workers with different settings or state: the replaced worker and the reported cause."""

from __future__ import annotations

import pytest

from holdfast.coordination.failures.mismatch import SCRIPT, TRANSFER, Mismatch, find_mismatch
from holdfast.protocol.fingerprint import Fingerprint
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.plan import Phase


def report(
    number: int,
    settings: int = 0,
    state: int = 0,
    *,
    step: int = 7,
    received: bool = False,
    version: int = 1,
    compared: bool = True,
) -> Report:
    fingerprint = Fingerprint(
        step=step,
        settings=settings,
        state=state,
        received=received,
        version=version,
        shown=(f"lr {settings}", "betas [0.9]"),
    )
    return Report(
        worker=f"n{number}/0/a",
        term=1,
        generation=1,
        applied=step - 1,
        step=step,
        phase=Phase.REFUSED,
        compared=fingerprint if compared else None,
    )


def found(*reports: Report, places: int = 1) -> Mismatch | None:
    return find_mismatch([one.worker for one in reports], {one.worker: one for one in reports}, places)


def test_equal_or_uncompared_reports_are_not_a_mismatch() -> None:
    assert found(report(0), report(1)) is None
    assert found(report(0), report(1, 5, compared=False)) is None
    assert found(report(0, step=7), report(1, 5, step=8)) is None, "reports of different steps are not compared"


def test_a_minority_is_named_with_the_difference() -> None:
    mismatch = found(report(0, 1), report(1, 1), report(2, 9))
    assert mismatch is not None
    assert (mismatch.step, mismatch.what, mismatch.minority, mismatch.likely_cause) == (7, "settings", ("n2",), SCRIPT)
    assert "the settings of n2 differ from those of the 2 other nodes (lr 9, not lr 1)" in mismatch.why
    assert "the likely cause is the script" in mismatch.why


@pytest.mark.parametrize("settings", [(1, 2), (1, 2, 3), (1, 1, 2, 2)])
def test_without_a_majority_no_node_is_replaced(settings: tuple[int, ...]) -> None:
    mismatch = found(*(report(number, one) for number, one in enumerate(settings)))
    assert mismatch is not None
    assert (mismatch.minority, mismatch.likely_cause) == ((), SCRIPT)
    assert "no majority of them agrees (lr 1 on n0, lr 2 on n" in mismatch.why


def test_of_two_different_workers_the_one_that_received_its_state_is_replaced() -> None:
    mismatch = found(report(0, state=1), report(1, state=2, received=True))
    assert mismatch is not None
    assert (mismatch.what, mismatch.minority, mismatch.likely_cause) == ("state", ("n1",), TRANSFER)
    assert "after the state was received there" in mismatch.why


def test_a_majority_counts_even_if_it_received_its_state() -> None:
    """At the start of a job, all workers but one receive their state."""
    mismatch = found(report(0, 9), report(1, 1, received=True), report(2, 1, received=True))
    assert mismatch is not None
    assert (mismatch.minority, mismatch.likely_cause) == (("n0",), SCRIPT)


def test_a_difference_without_a_transfer_blames_the_script() -> None:
    mismatch = found(report(0, state=1), report(1, state=1, received=True), report(2, state=2))
    assert mismatch is not None
    assert (mismatch.minority, mismatch.likely_cause) == (("n2",), SCRIPT)
    assert "outside the model" in mismatch.why


def test_only_workers_of_the_same_role_are_compared() -> None:
    workers = [report(0, 1), report(1, 2), report(2, 1), report(3, 2), report(4, 1), report(5, 3)]
    assert found(*workers[:4], places=2) is None
    mismatch = found(*workers, places=2)
    assert mismatch is not None
    assert mismatch.minority == ("n5",)
    both = found(*workers[:2], report(2, 8), *workers[3:], places=2)
    assert both is not None
    assert set(both.minority) == {"n2", "n5"}
    unclear = found(report(0, 1), report(1, 1), report(2, 2), report(3, 1), places=2)
    assert unclear is not None
    assert unclear.minority == ()


def test_fingerprints_of_different_versions_are_not_compared() -> None:
    mismatch = found(report(0, 1), report(1, 1), report(2, 1, version=2))
    assert mismatch is not None
    assert (mismatch.minority, mismatch.likely_cause) == ((), "")
    assert "version 1 on 2 workers, version 2 on 1 workers" in mismatch.why
    assert "install the same version of holdfast" in mismatch.why


def test_a_role_without_a_majority_precedes_a_repairable_one() -> None:
    """Ranks 0, 2 and 4 have one role, in which the third differs; ranks 1, 3 and 5 the other, in which all differ."""
    mismatch = found(*(report(number, one) for number, one in enumerate((1, 5, 1, 6, 9, 7))), places=2)
    assert mismatch is not None
    assert mismatch.minority == ()
    assert "no majority of them agrees (lr 5 on n1, lr 6 on n3" in mismatch.why
