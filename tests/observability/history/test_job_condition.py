"""The reason why a job makes no progress, from its newest events."""

from __future__ import annotations

import pytest
from test_explanation import BROKEN, CALM, numbered

from holdfast.observability.history.job_condition import find_condition
from holdfast.protocol.events import AnyEvent
from holdfast.protocol.position import Awaited
from made_events import made


@pytest.mark.parametrize(
    ("newest", "state", "why"),
    [
        ([], "running", ""),
        (BROKEN[:1], "recovering", "a failed (connection_lost)"),
        (BROKEN[:2], "recovering", "generation 2 (failure) has begun, and no step is committed in it yet"),
        ([made("job_waiting", 20.0, nodes=2, expert_slots=4, why="w")], "waiting", "w: it waits for 2 nodes with 4 mo"),
        ([made("job_failed", 20.0, why="all is lost")], "failed", "all is lost"),
        ([made("job_finished", 20.0, reason="completed")], "finished", "all is done: completed"),
    ],
)
def test_the_newest_relevant_event_gives_the_jobs_state_and_reason(
    newest: list[AnyEvent], state: str, why: str
) -> None:
    standing = find_condition(numbered([*CALM, *newest]))
    assert standing.state == state
    assert standing.why.startswith(why)
    assert (standing.step, standing.usual_step_s) == (9, 1.0)


def test_the_condition_of_a_waiting_job_has_the_requested_action() -> None:
    waiting = [made("job_waiting", 20.0, nodes=2, why="w")]
    asked = made("action_requested", 20.0, about_seq=len(CALM) + 1, who="operator", command="holdfast scale +2")
    standing = find_condition(numbered([*CALM, *waiting, asked]))
    assert (standing.state, standing.who, standing.command) == ("waiting", "operator", "holdfast scale +2")
    later = find_condition(numbered([*CALM, *waiting, asked, *BROKEN[:1]]))
    assert (later.state, later.command) == ("waiting", "holdfast scale +2"), "later failures must not change the reason"


def test_a_job_without_a_generation_is_waiting() -> None:
    assert (find_condition(CALM[:2]).state, find_condition(CALM[:2]).usual_step_s) == ("waiting", None)


def test_a_job_without_a_recent_commit_reports_the_delay() -> None:
    awaited = (Awaited(who="rank 1 on b", what="to apply step 10"),)
    standing = find_condition(CALM, now=25.0, state="running", awaited=awaited)
    assert standing.why == "no step was committed for 15.0 s; 1.000 s is usual"
    assert standing.awaited == awaited
