"""Tests that each evaluation result is reported once, by any worker and under any coordinator."""

from __future__ import annotations

from machinery import Job, attach, hello, w

from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg


def done(worker: str, *steps: int, generation: int = 1, value: float = 0.5) -> msg.EvaluationDone:
    results = [msg.EvaluationResult(name="eval", step=step, samples=10, metrics={"loss": value}) for step in steps]
    return msg.EvaluationDone(worker=worker, generation=generation, results=tuple(results))


def evaluated(job: Job) -> list[ev.Evaluated]:
    return [event for event in job.events if isinstance(event, ev.Evaluated)]


def reported_evaluations(job: Job) -> list[tuple[str, int]]:
    return [(event.name, event.step) for event in evaluated(job)]


def test_each_evaluation_is_emitted_once_and_in_order() -> None:
    job = Job(nodes=2).start()
    job.step(1)
    job.step(2)
    job.deliver(done(w("n0"), 1))
    job.deliver(done(w("n1"), 1))
    job.deliver(done(w("n1"), 1, 2))
    job.deliver(done(w("n0"), 1, 2))
    assert reported_evaluations(job) == [("eval", 1), ("eval", 2)]
    assert [event.metrics for event in evaluated(job)] == [{"loss": 0.5}] * 2


def test_a_later_coordinator_knows_the_emitted_evaluations() -> None:
    before = Job(nodes=2).start()
    before.step(1)
    before.deliver(done(w("n0"), 1))
    job = Job(nodes=2, records=before.records, events=before.events, now=before.now + 1.0).boot(takeover=True)
    kept = (attach(w("n0")), msg.Entered(worker=w("n0"), generation=1, applied=1), done(w("n0"), 1))
    job.connect(hello("n0", kept, term=1))
    job.connect(hello("n1", (attach(w("n1")), msg.Entered(worker=w("n1"), generation=1, applied=1)), term=1))
    assert reported_evaluations(job) == [("eval", 1)]
    job.deliver(done(w("n1"), 1, 2))
    assert reported_evaluations(job) == [("eval", 1), ("eval", 2)]


def test_an_evaluation_of_an_undone_step_is_emitted_again() -> None:
    job = Job(nodes=1).start()
    job.step(1)
    job.deliver(done(w("n0"), 1))
    job.machine.context.evaluations.on_rollback(0)
    assert dict(job.machine.record.evaluated) == {"eval": 0}
    job.deliver(done(w("n0"), 1, value=0.7))
    assert reported_evaluations(job) == [("eval", 1), ("eval", 1)]


def test_a_metric_that_is_not_finite_becomes_null() -> None:
    job = Job(nodes=1).start()
    job.step(1)
    job.deliver(done(w("n0"), 1, value=float("nan")))
    assert [event.metrics for event in evaluated(job)] == [{"loss": None}]


def test_results_of_unknown_workers_and_later_generations_do_not_count() -> None:
    job = Job(nodes=2).start()
    job.step(1)
    job.deliver(done(w("n0"), 1, generation=9))
    job.deliver(done("n0/0/ffff", 1))
    assert reported_evaluations(job) == []
