"""The time ledger: how a job spent its seconds, computed from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.observability.accounts.time_ledger import TimeAccount, TimeLedger
from holdfast.observability.accounts.time_spans import Cause
from holdfast.protocol.events import AnyEvent
from made_events import joined, made

STEP = 1.0


def step(number: int, time: float, world: int = 4, **fields: Any) -> AnyEvent:
    return made("step_committed", time, **{"step": number, "samples": 8, "world_size": world, **fields})


def generation(time: float, reason: str, members: str = "abcd") -> AnyEvent:
    return made("generation_started", time, reason=reason, members=tuple(members), world_size=len(members))


def begun(steps: int, **fields: Any) -> list[AnyEvent]:
    """Return the events of a job that waits 10 s for its four nodes, with a first step of 3 s and later ones of 1 s."""
    start = [made("job_started", **fields), *(joined(node, 5.0, worker_pids=(1,)) for node in "abcd")]
    return [*start, generation(10.0, "start"), *(step(number, 12.0 + number) for number in range(1, steps + 1))]


def after(events: Iterable[AnyEvent]) -> TimeLedger:
    ledger = TimeLedger()
    for event in events:
        ledger.add_event(event)
    return ledger


def spent(account: TimeAccount) -> dict[str, float]:
    """Return the seconds per cause, without causes of zero seconds."""
    return {str(cause): round(seconds, 9) for cause, seconds in account.seconds.items() if seconds}


def test_a_start_counts_as_waiting_and_then_as_transition() -> None:
    assert spent(after(begun(10)).account()) == {"waiting": 10.0, "transition": 2.0, "effective": 10.0}


def test_a_failure_costs_detection_transition_and_redone_time() -> None:
    failed = made("failure_detected", 22.75, node="b", after_s=0.25)
    events = [*begun(10), failed, generation(23.0, "failure", "acd"), step(11, 24.5, 3)]
    recovered = made(
        "recovered", 24.5, action="shrink", detect_s=0.25, decide_s=0.25, regroup_s=0.5, redo_s=1.0, down_s=2.0
    )
    # Half a step was done before the failure. The time of a whole one follows, and three nodes take 4/3 of four nodes'
    # time.
    assert spent(after([*events, recovered]).account()) == {
        "waiting": 10.0,
        "transition": 2.0 + 0.25 + 0.5,
        "effective": 11.0,
        "sub_healthy": pytest.approx(1 / 3),
        "detection": 0.25,
        "redone": pytest.approx(1.5 - 4 / 3),
    }


def test_a_step_reported_late_counts_as_before_the_failure() -> None:
    """The silent node was last heard before a step that the others report only after the failure."""
    failed = made("failure_detected", 25.8, node="b", after_s=3.4)
    events = [*begun(10), failed, generation(25.9, "failure"), step(11, 23.0), step(12, 26.9)]
    recovered = made("recovered", 26.9, action="shrink", detect_s=3.4, decide_s=0.1, redo_s=1.0, down_s=4.5)
    account = spent(after([*events, recovered]).account())
    assert account["detection"] == pytest.approx(2.8)
    assert account["effective"] == 12.0


def test_idle_time_before_a_failure_is_known_is_detection() -> None:
    events = [*begun(10), made("failure_detected", 142.0, node="b"), generation(142.0, "failure"), step(11, 143.0)]
    assert spent(after(events).account())["detection"] == 119.0


def test_steps_that_are_late_or_have_fewer_workers_are_sub_healthy() -> None:
    fewer = [generation(22.0, "failure", "ab"), *(step(10 + number, 22.0 + 2 * number, 2) for number in range(1, 6))]
    assert spent(after([*begun(10), *fewer]).account())["sub_healthy"] == 5.0
    late = [*begun(10), step(11, 23.09), step(12, 24.59)]
    assert spent(after(late).account()) == {
        "waiting": 10.0,
        "transition": 2.0,
        "effective": pytest.approx(12.09),  # A step that takes up to a tenth longer than usual counts as effective.
        "sub_healthy": pytest.approx(0.5),
    }


def test_a_pause_is_not_training_time_and_makes_no_step_late() -> None:
    ledger = after([*begun(10), step(11, 26.0, paused_s=3.0, seq=11), step(12, 27.0)])
    assert spent(ledger.account()) == {"waiting": 10.0, "transition": 2.0, "effective": 12.0, "paused": 3.0}
    assert ledger.usual.full == STEP


def test_the_usual_step_time_excludes_pauses() -> None:
    events = [*begun(1), *(step(number, 10.0 + 3 * number, paused_s=2.0) for number in range(2, 6))]
    assert after(events).account().full_step_s == STEP


def test_steps_repeated_after_a_rollback_count_as_redone() -> None:
    back = [made("rolled_back", 22.5, to_step=7, why="w"), generation(22.5, "rollback"), step(8, 24.0)]
    again = [*begun(10), *back, *(step(number, 16.0 + number) for number in range(9, 13))]
    account = after(again).account()
    assert spent(account) == {"waiting": 10.0, "transition": 2.0 + 1.0, "effective": 12.0, "redone": 3.0}
    assert account.goodput == pytest.approx(12 / 28), "a repeated step counts once"


def test_a_step_ends_the_wait_if_a_node_rejoins_a_restarted_coordinator() -> None:
    lost = [made("failure_detected", 22.0, node="a"), made("job_waiting", 22.0, nodes=1)]
    back = [made("coordinator_restarted", 31.0), step(11, 32.0), *(step(number, 21.0 + number) for number in (12, 13))]
    ledger = after([*begun(10), *lost, *back])
    assert spent(ledger.account()) == {"waiting": 10.0 + 9.0, "transition": 2.0, "effective": 13.0}
    assert ledger.settled()[Cause.WAITING] == 10.0 + 9.0


def test_the_time_of_a_job_without_nodes_is_waiting() -> None:
    lost = [made("failure_detected", 22.2, node="a"), made("job_waiting", 22.3, nodes=1)]
    ledger = after([*begun(10), *lost])
    assert spent(ledger.account(100.0))["waiting"] == 10.0 + 77.7
    assert ledger.settled(100.0)[Cause.WAITING] == 10.0 + 77.7, "a long wait must be reported before it ends"
    ledger.add_event(generation(122.3, "rollback"))
    ledger.add_event(step(11, 123.5))
    assert spent(ledger.account())["waiting"] == 10.0 + 100.0


def test_a_join_or_rebalance_costs_the_time_beyond_a_usual_step() -> None:
    events = [*begun(10), joined("e", 21.0), generation(22.5, "join", "abcde"), step(11, 23.0), step(12, 24.5, 5)]
    grown = made("recovered", 24.5, action="grow", regroup_s=0.6, redo_s=0.9, down_s=1.5)
    # Five nodes take 0.8 s.
    assert spent(after([*events, grown]).account())["transition"] == pytest.approx(2.0 + 0.7)
    moved = made("rebalanced", 24.5, down_s=1.5)
    assert spent(after([*events, moved]).account())["rebalance"] == pytest.approx(0.7)


def test_checkpoint_stalls_are_subtracted_from_the_delayed_steps() -> None:
    saved = [*begun(10), made("checkpoint_saved", 22.1, step=9, save_s=5.0, stall_s=0.25), step(11, 23.0)]
    account = after([*saved, made("job_waiting", 23.0, nodes=1)]).account()
    assert (spent(account)["checkpoint"], spent(account)["effective"]) == (0.25, 10.75)
    last = [generation(22.5, "save"), made("checkpoint_saved", 26.0, step=10, save_s=3.0)]
    assert spent(after([*begun(10), *last]).account())["checkpoint"] == 3.5


def test_steps_during_a_coordinator_outage_are_effective() -> None:
    """The coordinator is away from the tenth step on: it receives the missed steps first, and then sees later ones."""
    back = made("coordinator_restarted", 40.0)
    missed = [step(number, 12.0 + number) for number in range(11, 26)]
    assert spent(after([*begun(10), back, *missed]).account()) == {
        "waiting": 10.0,
        "transition": 2.0 + 2.0,
        "effective": 26.0,
    }
    broke = [made("failure_detected", 43.0, node="b", after_s=3.0), generation(43.0, "failure"), step(26, 44.0)]
    assert spent(after([*begun(10), back, *missed, *broke]).account()) == {
        "waiting": 10.0 + 2.0,  # The nodes also wait for a coordinator during the rest of the interrupted step.
        "transition": 2.0,
        "effective": 26.0,
        "detection": 3.0,
        "redone": 1.0,
    }


def test_the_time_between_end_and_resume_of_a_job_is_waiting() -> None:
    again = [made("coordinator_restarted", 90_000.0), made("rolled_back", 90_001.0, to_step=10, why="w")]
    events = [*begun(10), *again, generation(90_001.0, "rollback"), step(11, 90_003.0)]
    assert spent(after(events).account()) == {
        "waiting": 10.0 + 90_000.0 - 22.0 - 1.0,
        "transition": 2.0 + 1.0 + 2.0,
        "effective": 11.0,
    }


def test_the_time_of_lost_events_is_unknown() -> None:
    gap = made(
        "journal_repaired",
        62.0,
        from_seq=17,
        to_seq=60,
        from_step=10,
        to_step=40,
        samples=320,
        step_samples=8,
        step_time=52.0,
    )
    events = [*begun(10), gap, step(41, 53.0)]
    account = after(events).account()
    assert spent(account)["unknown"] == 30.0
    assert account.goodput == pytest.approx(41 / 62)


def test_a_failure_of_a_node_that_does_not_train_costs_no_time() -> None:
    events = [*begun(10), made("failure_detected", 22.5, node="x", after_s=3.0), step(11, 23.0), step(12, 24.0)]
    calm = after(events).account()
    later = [made("failure_detected", 24.5, node="b", after_s=0.5), generation(24.5, "failure"), step(13, 25.5)]
    assert spent(calm)["effective"] == 12.0
    assert spent(after([*events, *later]).account())["detection"] == 0.5


def test_flop_mfu_and_node_hours_are_computed() -> None:
    account = after([*begun(10, flop_per_sample=2.0, peak_flop_per_s=4.0), made("job_finished", 22.0)]).account(500.0)
    assert account.flop_delivered == 160.0
    assert account.mfu == pytest.approx(160.0 / (4.0 * 4 * 17.0)), "all accelerators count from their arrival"
    assert account.node_hours == account.accelerator_hours == pytest.approx(4 * 17.0 / 3600), (
        "the accelerators count until the job has finished"
    )
    unsaid = after(begun(10)).account()
    assert (unsaid.flop_delivered, unsaid.mfu) == (None, None)


def test_the_account_of_a_job_without_events_is_empty() -> None:
    account = TimeLedger().account()
    assert (account.wall_s, account.ettr, account.goodput, account.full_step_s) == (0.0, 0.0, None, None)


_TIMES = st.floats(min_value=0.0, max_value=1e6)
_EVENTS = st.one_of(
    st.builds(lambda t, k, w: step(k, t, w), _TIMES, st.integers(1, 9), st.integers(1, 4)),
    st.builds(lambda t, s: made("failure_detected", t, after_s=s), _TIMES, _TIMES),
    st.builds(generation, _TIMES, st.sampled_from(("start", "failure", "join", "rebalance", "rollback", "save"))),
    st.builds(
        lambda t, a, d, s: made("recovered", t, action=a, down_s=d, redo_s=s, detect_s=d / 2),
        _TIMES,
        st.sampled_from(("shrink", "grow", "restart_all")),
        _TIMES,
        _TIMES,
    ),
    st.builds(lambda t, k: made("rolled_back", t, to_step=k), _TIMES, st.integers(0, 9)),
    st.builds(lambda t, s: made("checkpoint_saved", t, stall_s=s), _TIMES, _TIMES),
    st.builds(lambda t, k: made("journal_repaired", t, step_time=t / 2, to_step=k), _TIMES, st.integers(0, 9)),
    *(st.builds(made, st.just(name), _TIMES) for name in ("job_waiting", "coordinator_restarted", "rebalanced")),
)


@given(st.lists(_EVENTS, max_size=40))
def test_causes_add_up_to_the_wall_time_and_counters_never_decrease(events: list[AnyEvent]) -> None:
    ledger, before = TimeLedger(), dict.fromkeys(Cause, 0.0)
    for event in events:
        ledger.add_event(event)
        account, settled = ledger.account(), dict(ledger.settled())
        assert sum(account.seconds.values()) == pytest.approx(account.wall_s, abs=1e-6)
        assert all(seconds >= -1e-9 for seconds in account.seconds.values())
        assert all(settled[cause] >= before[cause] for cause in Cause)
        before = settled
    assert asdict(after(events).account()) == asdict(ledger.account()), "reading the account must not change it"
