"""Tests of the event that asks for a person's attention after the event that it concerns."""

from __future__ import annotations

from machinery import Job

from holdfast.coordination.operator_alerts import request_of
from holdfast.protocol import events as ev
from made_events import made


def test_each_alert_has_an_addressee_and_a_command() -> None:
    asked = {
        made("job_waiting", seq=4, nodes=2, why="w"): ("operator", "holdfast scale +2"),
        made("node_left", seq=4, node="n7", reason="quarantined"): ("site", "holdfast undrain n7"),
        made("rolled_back", seq=4, to_step=3, why="w"): ("operator", "holdfast explain 4"),
        made("checkpoint_failed", seq=4, node="n7", why="w", tries=1): ("operator", "holdfast logs --node n7"),
        made("checkpoint_rejected", seq=4, name="c", why="w"): ("operator", "holdfast explain 4"),
        made("corruption_found", seq=4, step=6, what="samples"): ("operator", "holdfast explain 4"),
        made("step_skipped", seq=4, step=6, why="w", in_a_row=1): ("operator", "holdfast explain 4"),
        made("job_failed", seq=4, why="w"): ("operator", "holdfast explain 4"),
    }
    for event, (who, command) in asked.items():
        request = request_of(event, 5)
        assert request is not None
        assert (request["who"], request["command"], request["about_seq"]) == (who, command, 4)


def test_events_that_recover_automatically_raise_no_alert() -> None:
    for event in (
        made("node_left", node="n1", reason="failed"),
        made("rolled_back", to_step=5, why="the job resumes from its checkpoint"),
        made("failure_detected", node="n1", severity=1),
        made("step_committed", step=6),
        made("step_skipped", step=6, why="w", in_a_row=2),
        made("checkpoint_failed", node="n7", why="w", tries=2),
    ):
        assert request_of(event, 5) is None


def test_an_alert_follows_its_event_with_its_own_number() -> None:
    job = Job(nodes=1).start()
    job.step(1)
    job.lose("n0")
    failed, request = job.last_events()[-2:]
    assert isinstance(failed, ev.JobFailed)
    assert isinstance(request, ev.ActionRequested)
    assert (request.about, request.about_seq, request.seq) == ("job_failed", failed.seq, failed.seq + 1)
    assert request.why == failed.why
    assert [event.seq for event in job.events] == list(range(1, len(job.events) + 1))
