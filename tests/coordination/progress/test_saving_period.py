"""Tests of the default checkpoint period."""

from __future__ import annotations

import pytest
from machinery import Job, attach, hello, kept, w, written

from holdfast.coordination.config import PeriodBounds
from holdfast.coordination.progress.saving_period import add_loss, add_save, saving_period_s
from holdfast.protocol import events as ev
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.record import Saving

BOUNDS = PeriodBounds()
DAY_S = 86400.0


def test_the_first_period_is_short() -> None:
    assert saving_period_s(Saving(), 0.0, BOUNDS) == BOUNDS.first_s


@pytest.mark.parametrize(
    ("cost_s", "losses", "lived_s", "expected_s"),
    [
        (0.05, 0, 0.0, 93.0),  # sqrt(2 x 0.05 s x a day)
        (0.05, 0, 9 * DAY_S, 294.0),  # no loss in nine days: about a third as often
        (0.05, 9, 9 * DAY_S, 93.0),
        (5.0, 0, 0.0, 930.0),
        (60.0, 0, 0.0, 1800.0),  # at least once in half an hour
        (0.0001, 99, 0.0, 10.0),  # the shortest period
        (4.0, 999, 0.0, 400.0),  # at most a hundredth of the time
    ],
)
def test_the_period_follows_the_cost_of_saves_and_the_rate_of_losses(
    cost_s: float, losses: int, lived_s: float, expected_s: float
) -> None:
    saving = Saving(cost_s=cost_s, saves=1, losses=losses)
    assert saving_period_s(saving, lived_s, BOUNDS) == pytest.approx(expected_s, rel=0.01)


def test_the_cost_of_saves_is_a_moving_average() -> None:
    saving = add_save(Saving(), 10.0, 1.0)
    assert saving == Saving(saved_at=10.0, cost_s=1.0, saves=1)
    saving = add_save(saving, 20.0, 3.0)
    assert saving.cost_s == 2.0
    for time in range(100):
        saving = add_save(saving, float(time), 8.0)
    assert saving.cost_s == pytest.approx(8.0, rel=1e-3)
    assert add_loss(saving).losses == 1


def asked(job: Job) -> list[str]:
    return [
        worker for worker, order in job.orders(msg.AskCheckpoint).items() if order == msg.AskCheckpoint(if_free=True)
    ]


def saves(job: Job, step: int) -> None:
    job.step(step)
    job.deliver(written("n0", step, "c"))
    job.deliver(kept("n0", step, "c"))


def test_a_save_is_requested_from_the_first_worker_once_per_period() -> None:
    job = Job(nodes=2).start(saves=True, in_time=True)
    job.step(1)
    job.tick(BOUNDS.first_s - 1.0)
    assert asked(job) == []
    job.tick(1.0)
    assert asked(job) == [w("n0")]
    job.tick(1.0)
    assert asked(job) == []
    saves(job, 2)
    (event,) = job.emitted(ev.CheckpointSaved)
    assert event.period_s is not None
    job.step(3)
    job.tick(event.period_s - 1.0)
    assert asked(job) == []
    job.tick(1.1)  # the period grows while no work is lost
    assert asked(job) == [w("n0")]


def test_no_save_is_requested_without_a_new_step_or_a_period_in_time() -> None:
    jobs = [
        Job().start(saves=True, in_time=True),
        Job().start(saves=True),
        Job().start(),
    ]
    for number, job in enumerate(jobs):
        if number:
            job.step(1)
        job.tick(1e5)
        assert asked(job) == []


def test_a_new_coordinator_knows_the_saving_period() -> None:
    job = Job(nodes=1).start(saves=True, in_time=True)
    saves(job, 1)
    before = job.machine.context.checkpoints.period_s
    job.boot()
    job.connect(hello("n0", kept=(msg.Entered(worker=w("n0"), generation=1, applied=1),)))
    assert job.machine.context.checkpoints.period_s == pytest.approx(before)
    assert job.machine.record.saving.saves == 1


def test_a_rollback_shortens_the_saving_period() -> None:
    job = Job(nodes=1).start(saves=True, in_time=True)
    saves(job, 1)
    before = job.machine.context.checkpoints.period_s
    assert before is not None
    job.step(2)
    job.lose("n0")
    job.connect(hello("n1"))
    job.deliver(attach(w("n1")))
    assert job.machine.record.saving.losses == 1
    after = job.machine.context.checkpoints.period_s
    assert after is not None
    assert after < before
