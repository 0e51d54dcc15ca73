"""Tests that steps are released once, in order, and only after all members have applied them."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machinery import applied, commit, w

from holdfast.coordination.progress.ledger import DivergedError, StepLedger
from holdfast.protocol.messages.worker import Report
from holdfast.protocol.plan import PassedStep, Phase

MEMBERS = [w("n0"), w("n1"), w("n2")]


@given(data=st.data(), steps=st.integers(1, 6))
def test_any_interleaving_with_repeats_releases_each_step_once_in_order(data: st.DataObject, steps: int) -> None:
    told = [(worker, step) for worker in MEMBERS for step in range(1, steps + 1)]
    # Each worker's reports stay in order; repeats come from replays.
    order = data.draw(st.permutations(told + told[: len(told) // 2]))
    order = [(worker, step) for worker, step in order]
    ledger, released = StepLedger(), []
    ledger.follow(1, MEMBERS)
    heard: dict[str, int] = dict.fromkeys(MEMBERS, 0)
    for worker, _ in order:
        heard[worker] = min(heard[worker] + 1, steps)
        ledger.add_report(applied(worker, 1, heard[worker]), 100.0)
        released += [done.step for done in ledger.release()]
        assert len(released) == min(heard.values())
    assert released == list(range(1, min(heard.values()) + 1))


def test_no_step_is_released_while_a_members_step_is_unknown() -> None:
    ledger = StepLedger()
    ledger.add_report(applied(MEMBERS[0], 1, 1), 100.0)
    ledger.follow(1, MEMBERS[:2])
    assert ledger.release() == []
    ledger.follow(1, MEMBERS[:1])
    assert [done.step for done in ledger.release()] == [1]


def test_different_results_of_one_step_raise_an_error() -> None:
    ledger = StepLedger()
    ledger.add_report(applied(MEMBERS[0], 1, 1, commit(1.0)), 100.0)
    with pytest.raises(DivergedError, match="step 1"):
        ledger.add_report(applied(MEMBERS[1], 1, 1, commit(1.0 + 1e-15)), 100.0)


def test_the_node_with_another_state_is_named_once_all_have_reported() -> None:
    """The order of the reports does not matter; the step is not committed before the last one."""
    for order in itertools.permutations(MEMBERS):
        ledger = StepLedger()
        ledger.follow(1, MEMBERS)
        for worker in order:
            assert ledger.describe_divergence() == ""
            assert ledger.release() == []
            state_hash = "bad" if worker == w("n1") else "good"
            ledger.add_report(applied(worker, 1, 1, state_hash=state_hash), 100.0)
        assert ledger.describe_divergence().startswith(
            "step 1: the state of n1 differs from that of the 2 other nodes."
        )
        assert ledger.release() == []
        ledger.undo_after(0)
        assert ledger.describe_divergence() == ""


def test_both_nodes_are_named_if_two_states_differ() -> None:
    ledger = StepLedger()
    ledger.follow(1, MEMBERS[:2])
    for worker, state_hash in zip(MEMBERS, ("good", "bad"), strict=False):
        ledger.add_report(applied(worker, 1, 1, state_hash=state_hash), 100.0)
    assert ledger.describe_divergence().startswith(
        "step 1: the state of n0, n1 differ, and nothing shows which is right"
    )


def test_a_missing_state_hash_is_awaited_until_the_next_step_only() -> None:
    ledger = StepLedger()
    ledger.follow(1, MEMBERS)
    for worker, state_hash in zip(MEMBERS[:2], ("good", "bad"), strict=True):
        ledger.add_report(applied(worker, 1, 1, state_hash=state_hash), 100.0)
    assert ledger.describe_divergence() == ""
    ledger.add_report(applied(MEMBERS[0], 1, 2), 100.0)
    assert "step 1: the state of n0, n1 differ" in ledger.describe_divergence()


def test_no_state_hash_is_awaited_from_a_worker_that_joined_after_the_step() -> None:
    """Its state came from another node. If the job has no further step, no other report would ever come."""
    ledger = StepLedger()
    ledger.follow(1, MEMBERS[:2])
    for worker, state_hash in zip(MEMBERS[:2], ("good", "bad"), strict=True):
        ledger.follow(2, MEMBERS)
        ledger.add_report(applied(worker, 1, 1, state_hash=state_hash), 100.0)
    assert ledger.describe_divergence() == ""
    ledger.record_step(w("n2"), 1)
    assert "step 1: the state of n0, n1 differ" in ledger.describe_divergence()


def test_results_with_nan_are_equal() -> None:
    ledger = StepLedger()
    ledger.follow(1, MEMBERS)
    for worker in MEMBERS:
        ledger.add_report(applied(worker, 1, 1, commit(float("nan"))), 100.0)
    assert [done.step for done in ledger.release()] == [1]


def test_a_result_of_an_undone_step_is_not_compared() -> None:
    ledger = StepLedger()
    ledger.add_report(applied(MEMBERS[2], 1, 1, commit(9.0)), 100.0)
    ledger.forget(MEMBERS[2])
    ledger.undo_after(0)
    for worker in MEMBERS[:2]:
        ledger.add_report(applied(worker, 2, 1, commit(1.0)), 100.0)
    ledger.follow(1, MEMBERS[:2])
    assert [done.commit for done in ledger.release()] == [commit(1.0)]


def test_a_workers_step_is_forgotten_if_the_step_is_undone() -> None:
    ledger = StepLedger()
    ledger.follow(1, MEMBERS[:2])
    for worker, steps in ((MEMBERS[0], 2), (MEMBERS[1], 1)):
        for step in range(1, steps + 1):
            ledger.add_report(applied(worker, 1, step), 100.0)
    assert [done.step for done in ledger.release()] == [1]
    ledger.undo_after(1)
    ledger.follow(2, MEMBERS[:2])
    ledger.add_report(applied(MEMBERS[1], 2, 2), 100.0)
    assert ledger.release() == []
    ledger.add_report(applied(MEMBERS[0], 2, 2), 100.0)
    assert [done.step for done in ledger.release()] == [2]


def test_steps_are_released_again_after_a_reset() -> None:
    ledger = StepLedger()
    ledger.follow(1, MEMBERS[:1])
    for step in (1, 2):
        ledger.add_report(applied(MEMBERS[0], 1, step), 100.0)
    assert len(ledger.release()) == 2
    ledger.reset(1)
    ledger.add_report(applied(MEMBERS[0], 2, 2), 100.0)
    assert [done.step for done in ledger.release()] == [2]


def test_only_results_that_are_lost_are_filled_in() -> None:
    ledger = StepLedger()
    ledger.add_report(applied(MEMBERS[0], 1, 2, commit(2.0)), 100.0)
    last = Report(
        worker=MEMBERS[0], term=1, generation=1, applied=3, step=4, phase=Phase.COMPUTE,
        passed=PassedStep(step=3, commit=commit(3.0)),
    )  # fmt: skip
    ledger.add_final_reports([last], 24)
    ledger.follow(1, MEMBERS[:1])
    done = ledger.release()
    assert [step.commit.samples for step in done] == [24, 24, 24]
    assert done[0].commit.loss_sum != done[0].commit.loss_sum
    assert [step.commit for step in done[1:]] == [commit(2.0), commit(3.0)]


def test_steps_with_large_logs_are_released_a_few_at_a_time() -> None:
    heavy = msgspec.structs.replace(commit(), metrics={f"{number:020}": 1.0 for number in range(500)})
    ledger = StepLedger()
    ledger.follow(1, MEMBERS[:1])
    for step in range(1, 101):
        ledger.add_report(applied(MEMBERS[0], 1, step, heavy), 100.0)
    assert ledger.more_than(1000, up_to=100)
    assert not ledger.more_than(1000, up_to=10)
    released: list[int] = []
    while some := ledger.release(1000):
        assert len(some) <= 16
        assert all(done.commit == heavy for done in some)
        released += [done.step for done in some]
    assert released == list(range(1, 101))


def test_different_logged_values_raise_an_error() -> None:
    """Replicas that log different values differ."""
    ledger = StepLedger()
    nan = msgspec.structs.replace(commit(), metrics={"a": float("nan")})
    ledger.add_report(applied(MEMBERS[0], 1, 1, nan), 100.0)
    ledger.add_report(applied(MEMBERS[1], 1, 1, nan), 100.0)
    with pytest.raises(DivergedError, match="step 1"):
        ledger.add_report(applied(MEMBERS[2], 1, 1, msgspec.structs.replace(nan, metrics={"a": 0.0})), 100.0)
