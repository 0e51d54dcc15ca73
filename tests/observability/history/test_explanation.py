"""Explanations of events: failures, attempted remedies, their cost, and rejected alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from holdfast.errors import BadInputError
from holdfast.observability.history.explanation import explain
from holdfast.protocol.events import AnyEvent
from made_events import joined, made


def numbered(events: Sequence[AnyEvent]) -> list[AnyEvent]:
    return [msgspec.structs.replace(event, seq=place) for place, event in enumerate(events, 1)]


def step(number: int, time: float, **fields: Any) -> AnyEvent:
    return made("step_committed", time, **{"step": number, "samples": 8, "world_size": 3, "step_s": 1.0, **fields})


def generation(time: float, number: int, reason: str, members: str = "abc", decision: str = "") -> AnyEvent:
    return made(
        "generation_started",
        time,
        generation=number,
        reason=reason,
        members=tuple(members),
        world_size=len(members),
        decision=decision,
    )


#: Three nodes, nine steps, and a checkpoint of the fifth.
CALM = [
    made("job_started"),
    *(joined(node, 1.0, worker_pids=(1,)) for node in "abc"),
    generation(1.0, 1, "start", decision="start"),
    *(step(number, 1.0 + number) for number in range(1, 10)),
    made("checkpoint_saved", 9.9, step=5),
]
#: The group breaks and the same members try again. That fails too, and b is removed.
BROKEN = [
    made("failure_detected", 10.5, node="a", kind="connection_lost", detector="exception", severity=3, after_s=0.25),
    generation(10.6, 2, "failure", decision="redo"),
    made("failure_detected", 12.0, node="b", kind="hang", detector="timeout", severity=1, category="task hang"),
    made("node_left", 12.0, node="b", reason="failed"),
    generation(12.25, 3, "failure", "ac", decision="redo"),
    step(10, 14.0, world_size=2),
    made(
        "recovered",
        14.0,
        action="shrink",
        state_source="none",
        detect_s=0.25,
        decide_s=2.0,
        regroup_s=0.5,
        redo_s=1.0,
        down_s=3.75,
        micro_batches_kept=4,
    ),
    step(11, 15.5, world_size=2),
]
STORY = numbered([*CALM, *BROKEN])
FIRST = len(CALM) + 1


def test_every_event_of_a_recovery_explains_the_whole_recovery() -> None:
    explanations = [explain(STORY, seq) for seq in range(FIRST, FIRST + 7) if seq != FIRST + 5]
    assert {(one.action, len(one.failures), len(one.rungs), one.over) for one in explanations} == {
        ("shrink", 2, 2, True)
    }
    found = explanations[0]
    first, second = found.rungs
    assert (first.severity, first.held, first.why_not) == (3, False, "b: task hang")
    assert (second.severity, second.held) == (1, True)
    assert "same members" in first.what
    assert "taken out" in second.what
    assert "computed again" in second.decision
    assert found.phases == {"detect": 0.25, "decide": 2.0, "regroup": 0.5, "transfer": 0.0, "redo": 1.0, "down": 3.75}
    assert (found.micro_batches_kept, found.state_source) == (4, "none")
    assert found.seconds is not None
    assert sum(found.seconds.values()) == pytest.approx(4.0), "from the ninth step's commit to the tenth's"
    assert {one.what: one.why for one in found.rejected} == {
        "the same members once more": "b cannot be one of them",
        "waiting for b": "the others can go on, and nodes that come back join them",
        "going back to the checkpoint of step 5": "the state of step 9 lives: 4 steps would have been computed again",
    }


def test_an_unfinished_recovery_is_explained_as_unfinished() -> None:
    found = explain(STORY[: FIRST + 2], FIRST)
    assert (found.over, found.action, found.phases) == (False, "", None)
    assert [rung.held for rung in found.rungs] == [False]
    assert found.seconds is not None
    assert sum(found.seconds.values()) == pytest.approx(2.0), "an unfinished recovery must count too"


def test_a_step_is_compared_with_the_usual_step_time() -> None:
    calm = explain(STORY, FIRST - 2)
    assert calm.why == "it took 1.00 times the usual step of 3 workers, 1.000 s"
    assert calm.seconds == {"effective": pytest.approx(1.0)}
    late = numbered([*CALM, step(10, 13.0, step_s=3.0)])
    assert explain(late, len(late)).why.endswith("more than 1.1 times is late")


def test_a_rollback_is_explained_by_lost_state_and_damaged_checkpoints() -> None:
    back = [
        made("failure_detected", 10.5, node="a", kind="connection_lost", severity=1),
        made("job_waiting", 10.6, nodes=1, why="no node is left"),
        made("checkpoint_rejected", 20.0, name="step-9", why="a byte is not what it was"),
        made("rolled_back", 20.0, to_step=5, why="parameters have no live copy"),
        generation(20.0, 2, "rollback", decision="rollback"),
        step(6, 22.0),
        made("recovered", 22.0, action="rollback", state_source="checkpoint", moved_bytes=7),
    ]
    found = explain(numbered([*CALM, *back]), FIRST)
    assert (found.action, found.state_source, found.moved_bytes) == ("rollback", "checkpoint", 7)
    assert found.why == "parameters have no live copy"
    assert {one.what: one.why for one in found.rejected} == {
        "checkpoint step-9": "a byte is not what it was",
        "the same members once more": "a cannot be one of them",
        "going on without a": "no node is left",
        "going on from step 9": "parameters have no live copy",
    }
    assert found.seconds is not None
    assert found.seconds["waiting"] == pytest.approx(9.4)


def test_a_refused_step_is_explained_by_its_wrong_samples() -> None:
    found = made("corruption_found", 10.5, step=10, what="samples", detail="one counts twice")
    again = [generation(10.6, 2, "failure", decision="redo"), step(10, 12.0), made("recovered", 12.0, action="retry")]
    explanation = explain(numbered([*CALM, found, *again]), FIRST)
    assert explanation.why == "the samples of step 10 were not what they must be: one counts twice"
    assert (explanation.action, [rung.held for rung in explanation.rungs]) == ("retry", [True])


def test_workers_with_different_settings_are_explained() -> None:
    """The explanation must not read "the settings of step 10 were not what they must be"."""
    detail = "the settings of a differ from those of b (lr 0.1, not lr 0.2)"
    found = made("corruption_found", 10.5, step=10, what="settings", detail=detail)
    again = [generation(10.6, 2, "failure", decision="redo"), step(10, 12.0), made("recovered", 12.0, action="retry")]
    explanation = explain(numbered([*CALM, found, *again]), FIRST)
    assert explanation.why == f"workers differed before step 10: {detail}"


def test_joins_rebalances_and_starts_are_explained() -> None:
    swap = [joined("d", 10.5), generation(10.9, 2, "join", "abcd"), step(10, 11.0), step(11, 12.5, world_size=4)]
    grown = numbered([*CALM, *swap, made("recovered", 12.5, action="grow", state_source="live", moved_bytes=9)])
    found = explain(grown, FIRST)
    assert (found.action, found.state_source, found.failures) == ("grow", "live", ())
    assert [rung.what for rung in found.rungs] == ["who has come joins at a step's boundary, while the others train"]
    moved = numbered([*CALM, generation(10.5, 2, "rebalance"), step(10, 11.0), made("rebalanced", 11.0, moved_bytes=3)])
    found = explain(moved, FIRST)
    assert (found.action, found.moved_bytes, found.phases) == ("rebalance", 3, {"transfer": 0.0, "down": 0.0})
    assert [rung.what for rung in explain(STORY, 3).rungs] == ["the first members begin"]
    stays = numbered([*CALM, made("rebalance_decided", 10.5, adopted=False, why="it would not pay")])
    assert explain(stays, len(stays)).why == "it would not pay"


def test_a_failure_without_loss_of_a_member_is_explained_separately() -> None:
    alone = [made("failure_detected", 10.2, node="x", kind="lease_expired", severity=1), step(10, 11.0)]
    events = numbered([*CALM, *alone, *BROKEN[:1], *BROKEN[1:]])
    assert [failure.node for failure in explain(events, FIRST).failures] == ["x"]
    assert [failure.node for failure in explain(events, FIRST + 2).failures] == ["a", "b"]


def test_a_requested_action_is_explained_by_its_cause() -> None:
    waiting = [made("failure_detected", 10.5, node="a", severity=1), made("job_waiting", 10.6, nodes=1, why="w")]
    asked = made("action_requested", 10.6, about="job_waiting", about_seq=FIRST + 1, why="w", command="c")
    events = numbered([*CALM, *waiting, asked])
    found = explain(events, FIRST + 2)
    assert (found.event.seq, found.why, [failure.node for failure in found.failures]) == (FIRST + 2, "w", ["a"])


def test_events_before_the_failure_are_not_part_of_a_recovery() -> None:
    """An earlier restart, limit or spare node is not part of a recovery, which starts with its failure."""
    early = [made("coordinator_restarted", 9.95), made("limit_raised", 9.96), joined("x", 9.97)]
    steps = [step(number, 1.0 + number) for number in range(10, 20)]
    late = [msgspec.structs.replace(event, time=event.time + 10.0) for event in BROKEN[:5]]
    recovered = made("recovered", 24.0, action="shrink")
    events = numbered([*CALM, *early, *steps, *late, step(20, 24.0, world_size=2), recovered])
    found = explain(events, events[-1].seq)
    assert found.seconds is not None
    assert sum(found.seconds.values()) == pytest.approx(4.0)
    assert [one.what for one in found.rejected][-1] == "going back to the checkpoint of step 5"
    assert explain(events, len(CALM) + 1).failures == ()


def test_an_unknown_event_number_is_bad_input() -> None:
    with pytest.raises(BadInputError, match="there is no event 999: the events are those up to"):
        explain(STORY, 999)


def test_stack_dumps_belong_to_their_failure_in_any_order_of_events() -> None:
    stood = made("stacks_taken", 10.4, of_generation=1, suspects=("rank 1 on b",))
    failed = made("failure_detected", 10.5, generation=1, node="b", kind="hang", detector="statistics", severity=2)
    after = generation(10.6, 2, "failure", decision="redo")
    for story in ([stood, failed, after], [failed, after, stood], [failed, stood, after]):
        events = numbered([*CALM, *story, step(10, 12.0)])
        seq = next(event.seq for event in events if event.time == 10.5)
        found = explain(events, seq).stood
        assert found is not None
        assert found.suspects == ("rank 1 on b",)
        assert explain(events, found.seq).stood == found
    other = made("stacks_taken", 10.4, of_generation=7)
    assert explain(numbered([*CALM, other, failed, after]), len(CALM) + 2).stood is None
