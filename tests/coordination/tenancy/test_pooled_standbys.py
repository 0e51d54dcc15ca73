"""A pool's standby in a job: it waits by its grant, takes a place by itself, and joins where the pool wants it to."""

from __future__ import annotations

from typing import Any

import msgspec
from machinery import Job, attach, hello, w

from holdfast.coordination.inputs import PoolSaid
from holdfast.coordination.instructions import TellPool
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.pool.held import Held
from holdfast.protocol.pool.sharing import JobShares, JobStands


class Reserved(Job):
    """Drives a job of two nodes, n0 and n1 by grants 1 and 2, for which the pool has s0 wait, by grant 3."""

    version = 0

    def shares(self, *, leaving: tuple[int, ...] = (), standbys: tuple[int, ...] = (3,), **grants: int) -> None:
        self.version += 1
        said = JobShares(
            term=1,
            version=self.version,
            submission=1,
            grants=grants or {"n0": 1, "n1": 2, "s0": 3},
            leaving=frozenset(leaving),
            standbys=frozenset(standbys),
        )
        self.feed(PoolSaid(said))

    def comes(self, node: str, grant: int, *, standby: bool = False) -> None:
        self.connect(msgspec.structs.replace(hello(node), grant=grant, standby=standby))
        self.say(attach(w(node)))

    def train(self, *, warm: bool = True) -> Reserved:
        self.boot()
        self.shares()
        for node, grant in (("n0", 1), ("n1", 2)):
            self.comes(node, grant)
        self.comes("s0", 3, standby=True)
        for node in ("n0", "n1"):
            self.say(msg.Entered(worker=w(node), generation=1, applied=0))
        if warm:
            self.say(msg.Warmed(worker=w("s0"), seconds=0.5))
        self.step(1, "n0", "n1")
        return self

    @property
    def told(self) -> list[JobStands]:
        return [one.stands for one in self.last if isinstance(one, TellPool)]

    @property
    def held(self) -> Held:
        held = self.machine.record.held
        assert held is not None
        return held

    @property
    def members(self) -> tuple[str, ...]:
        plan = self.machine.record.plan
        assert plan is not None
        return plan.workers


def reserved(**spec: Any) -> Reserved:
    return Reserved(nodes=2, submission=1, spec=JobSpec(**spec))


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
    job.shares(standbys=(), n0=1, s0=3)
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
    job.shares(n0=1, s0=3)  # (it has not heard of it)
    assert job.held.waiting == frozenset()
    assert not job.machine.members.standbys


def test_one_that_is_called_before_it_has_come_comes_as_a_node_like_any_other() -> None:
    job = reserved()
    job.boot()
    job.shares()
    job.shares(standbys=())
    job.comes("s0", 3, standby=True)
    assert not job.machine.members.standbys
    assert job.held.waiting == frozenset()


def test_one_that_is_called_before_the_job_has_begun_comes_again() -> None:
    job = reserved()
    job.boot()
    job.shares()
    job.comes("s0", 3, standby=True)
    job.shares(standbys=())
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
    assert job.held.waiting == {3}, "it is no place that is empty"
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
    assert job.machine.parts.stopping.stop is None
