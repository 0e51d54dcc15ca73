"""Tests of a pool's standby in a job: it waits by its grant, replaces a lost node, or joins if the pool wants it."""

from __future__ import annotations

from machinery import w
from pooled_job import reserved

from holdfast.protocol.messages import any_side as msg


def test_it_waits_by_its_grant_and_the_pool_is_told_who_trains() -> None:
    job = reserved().train()
    assert job.held.waiting == {3}
    assert list(job.machine.members.standbys) == ["s0"]
    job.shares()
    assert (job.told[-1].standbys, job.told[-1].trains) == ({3}, {1, 2})


def test_it_takes_a_place_with_the_write_that_gives_the_lost_node_back() -> None:
    job = reserved().train()
    job.lose("n1")
    assert job.held.numbers == {1, 2, 3}
    job.report("n0", 1)
    assert job.members == (w("n0"), w("s0"))
    assert (job.held.numbers, job.held.waiting) == ({1, 3}, frozenset())
    (told,) = job.told
    assert (told.held, told.standbys) == ({1, 3}, frozenset())


def test_one_that_was_cold_joins_where_the_pool_wants_it_to() -> None:
    job = reserved().train(warm=False)
    job.lose("n1")
    job.report("n0", 1)
    assert job.members == (w("n0"),)
    assert job.held.waiting == {3}
    job.say(msg.Entered(worker=w("n0"), generation=2, applied=1))
    job.shares(standbys=(), called=("s0",), n0=1, s0=3)
    assert job.held.waiting == frozenset()
    assert not job.machine.members.standbys
    job.tick(0.2)
    pending = job.machine.record.pending
    assert pending is not None
    assert pending.workers == (w("n0"), w("s0"))


def test_older_words_of_the_pool_have_nobody_wait_again() -> None:
    job = reserved().train()
    job.lose("n1")
    job.report("n0", 1)
    job.shares(n0=1, s0=3)  # the pool does not know about the loss yet
    assert job.held.waiting == frozenset()
    assert not job.machine.members.standbys


def test_one_that_is_called_before_it_has_come_comes_as_a_node_like_any_other() -> None:
    job = reserved()
    job.boot()
    job.shares()
    job.shares(standbys=(), called=("s0",))
    job.comes("s0", 3, standby=True)
    assert not job.machine.members.standbys
    assert job.held.waiting == frozenset()


def test_one_that_is_called_before_the_job_has_begun_comes_again() -> None:
    job = reserved()
    job.boot()
    job.shares()
    job.comes("s0", 3, standby=True)
    job.shares(standbys=(), called=("s0",))
    assert job.sent(msg.Refused)[0].retry
    job.comes("s0", 3, standby=True)
    assert not job.machine.members.standbys


def test_one_that_was_not_granted_to_wait_does_not_whatever_it_says() -> None:
    job = reserved()
    job.boot()
    job.shares(standbys=())
    job.comes("s0", 3, standby=True)
    assert not job.machine.members.standbys


def test_nobody_takes_the_place_of_a_node_that_the_pool_wants_back() -> None:
    job = reserved().train()
    job.shares(leaving=(2,))
    job.step(2, "n0", "n1")
    job.report("n0", 2)
    job.report("n1", 2)
    assert job.members == (w("n0"),)
    assert job.held.waiting == {3}
    job.say(msg.Entered(worker=w("n0"), generation=2, applied=2))
    for step in (3, 4, 5):
        job.step(step, "n0", generation=2)
    assert job.held.numbers == {1, 3}
    assert job.held.waiting == {3}, "the rank is not empty"
    assert job.machine.record.pending is None


def test_one_that_the_pool_wants_back_goes_at_once() -> None:
    job = reserved().train()
    job.shares(leaving=(3,))
    job.tick(0.2)
    assert job.sent(msg.EndNode)
    assert job.held.numbers == {1, 2}


def test_one_that_is_lost_is_given_back_and_nobody_is_stopped() -> None:
    job = reserved().train()
    job.lose("s0")
    assert job.held.numbers == {1, 2}
    assert job.machine.context.interruption.stop is None
