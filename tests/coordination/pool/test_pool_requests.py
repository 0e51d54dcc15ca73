"""Tests of users' requests to a pool, and of the reasons for refusals."""

from __future__ import annotations

import pytest
from played_pool import PlayedPool

from holdfast.coordination.pool.inputs import ResumeJob, StopPooled, SuspendJob, UpdateJob
from holdfast.errors import BadInputError, RefusedError, UnreachableError
from holdfast.protocol.job_spec import PaceSpec
from holdfast.protocol.pool import events as ev


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        (
            {"name": "one"},
            "name is 'one': a job of this name is admitted; give another (--name), or stop that one first",
        ),
        ({"least": 5}, "job two needs 5 nodes, and the pool has 4 nodes, of which 1 are kept in reserve: 3 would fit"),
        (
            {"least": 4, "sizes": (4, 8)},
            "job two needs 4 nodes, and the pool has 4 nodes, of which 1 are kept in reserve: none of its sizes fits",
        ),
        ({"least": 5, "most": 4}, "min_nodes is 5: it must be at most max_nodes (4)"),
        ({"least": 3, "most": 4, "sizes": (2, 8)}, "sizes is 2, 8: none lies within min_nodes and max_nodes (3 to 4)"),
        (
            {"pace": PaceSpec(step_s=(0.0, 1e-300), micro_batches=1, samples=1)},
            "pace.step_s says that a step with 2 nodes takes 1e-300 s: give seconds, 1e-09 or more, or 0",
        ),
        (
            {"preemptible": True, "saves": False},
            "preemptible is true, without checkpoint.dir: the job would start from scratch",
        ),
    ],
)
def test_an_invalid_job_is_refused(keys: dict[str, object], complaint: str) -> None:
    pool = PlayedPool(nodes=4, reserve=1)
    pool.submit("one", most=2)
    before = pool.record
    with pytest.raises(BadInputError) as raised:
        pool.submit(**{"name": "two", **keys})  # pyright: ignore
    assert complaint in str(raised.value)
    assert pool.record == before
    pool.submit("three")
    assert [event.seq for event in pool.events] == list(range(1, len(pool.events) + 1))


def test_a_sized_job_must_fit_the_pool_with_its_full_size() -> None:
    pool = PlayedPool(nodes=4, policy="sized")
    with pytest.raises(BadInputError, match=r"job one needs 6 nodes, and the pool has 4 nodes: 4 would fit"):
        pool.submit("one", least=2, most=6)


def test_a_pool_accepts_jobs_before_its_nodes_connect() -> None:
    pool = PlayedPool()
    pool.submit("one", least=2)
    assert pool.record.jobs["one"].why == "it needs 2 nodes, and none can be given"
    early = PlayedPool(nodes=1, expected=8)
    early.submit("one", least=8)
    assert early.state_of("one") == "queued"


def test_the_name_of_an_ended_job_can_be_reused() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    pool.stands("one", standing="failed", why="it raised")
    pool.submit("one")
    assert pool.record.jobs["one"].submission == 2


def test_stopping_a_job_that_is_queued_running_or_over() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    pool.submit("two")
    pool.feed(StopPooled("two"))
    assert pool.state_of("two") == "stopped", "a queued job has no processes to end"
    pool.feed(StopPooled("one"))
    assert (pool.state_of("one"), pool.job_told["one"].wish) == ("stopping", "stop")
    assert pool.nodes_of("one") == {"n1"}
    pool.stands("one", standing="stopped")
    with pytest.raises(RefusedError, match=r"job one is over: stopped \(a person has stopped it\)"):
        pool.feed(StopPooled("one"))
    with pytest.raises(UnreachableError, match="there is no job 'three': the jobs are none"):
        pool.feed(StopPooled("three"))


def test_an_immediate_stop_overrides_a_pending_save() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    pool.feed(StopPooled("one"))
    pool.feed(StopPooled("one", now=True))
    assert pool.job_told["one"].wish == "stop_now"
    pool.feed(StopPooled("one"))
    assert pool.job_told["one"].wish == "stop_now", "a normal stop does not revoke an immediate one"
    pool.restart()
    assert pool.job_told["one"].wish == "stop_now"
    pool.stands("one", standing="stopped")
    pool.submit("one")
    pool.come("n1")
    assert pool.job_told["one"].wish == "run"
    pool.feed(SuspendJob("one"))
    pool.feed(StopPooled("one", now=True, why="its pool was ended"))
    assert pool.job_told["one"].wish == "stop_now"
    pool.stands("one", standing="stopped")
    assert (pool.state_of("one"), pool.record.jobs["one"].why) == ("stopped", "its pool was ended")


def test_a_job_is_suspended_and_resumed() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one")
    pool.feed(SuspendJob("one"))
    pool.feed(SuspendJob("one"))
    assert pool.job_told["one"].wish == "suspend"
    assert pool.job_told["one"].leaving == frozenset(), "the job needs its nodes until it is saved"
    pool.stands("one", standing="suspended", without={"n1", "n2"})
    assert (pool.state_of("one"), pool.record.grants) == ("suspended", {})
    pool.tick()
    assert pool.state_of("one") == "suspended"
    pool.feed(ResumeJob("one"))
    assert pool.state_of("one") == "admitted"
    assert pool.nodes_of("one") == {"n1", "n2"}
    assert pool.job_told["one"].wish == "run"


def test_a_suspension_report_from_before_a_resume_is_ignored() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    pool.feed(SuspendJob("one"))
    old = pool.job_told["one"]
    pool.stands("one", standing="suspended", without={"n1"})
    pool.feed(ResumeJob("one"))
    pool.feed(SuspendJob("one"))
    newest = pool.job_told["one"]
    pool.job_told["one"] = old
    pool.stands("one", standing="suspended", without={"n1"})
    assert pool.state_of("one") == "suspending", "the report is older than this request"
    pool.job_told["one"] = newest
    pool.stands("one", standing="suspended", without={"n1"})
    assert pool.state_of("one") == "suspended"


def test_a_job_suspended_again_must_first_return_its_new_nodes() -> None:
    """It was resumed and suspended again before it received either; its record says suspended, with nodes."""
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    pool.feed(SuspendJob("one"))
    pool.stands("one", standing="suspended", without={"n1"})
    pool.feed(ResumeJob("one"))
    pool.feed(SuspendJob("one"))
    pool.stands("one", standing="suspended")
    assert (pool.state_of("one"), set(pool.record.grants)) == ("suspending", {"n1"})
    pool.stands("one", standing="suspended", without={"n1"})
    assert (pool.state_of("one"), set(pool.record.grants)) == ("suspended", set())


def test_a_job_resumed_during_its_suspension_is_admitted_again() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    pool.feed(SuspendJob("one"))
    pool.feed(ResumeJob("one"))
    pool.stands("one", standing="suspended", without={"n1"})
    assert pool.state_of("one") == "admitted"


def test_a_queued_job_can_be_suspended() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    pool.submit("two")
    pool.feed(SuspendJob("two"))
    pool.stands("one", standing="finished")
    assert pool.state_of("two") == "suspended"
    pool.feed(ResumeJob("two"))
    assert pool.nodes_of("two") == {"n1"}
    assert [event.job for event in pool.of_kind(ev.JobResumed)] == ["two"]


def test_a_job_without_checkpoints_is_not_suspended_unless_forced() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one", saves=False)
    with pytest.raises(
        RefusedError, match=r"job one keeps no checkpoints: after a suspension it would start from scratch"
    ):
        pool.feed(SuspendJob("one"))
    pool.feed(SuspendJob("one", force=True))
    assert pool.state_of("one") == "suspending"


def test_a_stopping_job_cannot_be_suspended_or_resumed() -> None:
    pool = PlayedPool(nodes=1)
    pool.submit("one")
    pool.feed(StopPooled("one"))
    for request in (SuspendJob("one"), ResumeJob("one")):
        with pytest.raises(RefusedError, match="job one is about to end"):
            pool.feed(request)


def test_the_requirements_of_a_job_can_be_updated() -> None:
    pool = PlayedPool(nodes=6, policy="weighted")
    pool.submit("one")
    pool.submit("two")
    pool.stands("one")
    assert (len(pool.nodes_of("one")), len(pool.nodes_of("two"))) == (3, 3)
    pool.feed(UpdateJob("two", {"weight": 2.0}))
    pool.stands("one")
    assert (len(pool.nodes_of("one")), len(pool.nodes_of("two"))) == (2, 4)
    for changes, complaint in (
        ({"weight": 0.0}, "job two: Expected `float` > 0"),
        ({"min_nodes": 9}, "min_nodes is 9: it must be at most max_nodes"),
        ({"min_nodes": 7, "max_nodes": 7}, "job two needs 7 nodes"),
        ({"script": 1}, "script of a submitted job cannot be changed; these settings can: min_nodes, max_nodes"),
    ):
        with pytest.raises(BadInputError, match=complaint):
            pool.feed(UpdateJob("two", changes))


def test_a_full_pool_refuses_new_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.coordination.pool.requests.MAX_JOBS", 3)
    pool = PlayedPool(nodes=1)
    for number in range(3):
        pool.submit(f"j{number}")
    with pytest.raises(RefusedError, match="the pool has 3 jobs, and takes no more: wait until some are over"):
        pool.submit("j3")
    pool.feed(StopPooled("j2"))
    pool.submit("j3")


def test_job_specifications_are_bounded_and_ended_jobs_are_dropped() -> None:
    pool = PlayedPool(nodes=1)
    large = "x" * 60_000
    for number in range(17):
        pool.submit(f"j{number}", args=(large,))
    with pytest.raises(RefusedError, match=r"the specification of job j17 has \d+ bytes, .* give shorter args"):
        pool.submit("j17", args=(large,))
    for number in range(1, 17):
        pool.feed(StopPooled(f"j{number}"))
    assert len(pool.record.jobs) == 17
    pool.submit("j17", args=(large,))
    assert len(pool.record.jobs) == 17, "the oldest ended job made room"
    assert pool.record.jobs.keys() >= {"j0", "j2", "j16", "j17"}
