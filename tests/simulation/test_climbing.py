"""Hierarchical collectives: no rank gets a result before all have joined, and a death blocks only dependent ranks."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from holdfast.planner.fleet.timeline import Timeline
from holdfast.planning.levels import compute_levels
from holdfast.protocol.plan import GenerationPlan, Member
from tests.simulation.climbing import LeveledGroup
from tests.simulation.collectives import Underway
from tests.simulation.faults.troubles import DataPlane

#: There are three levels, with a rank that owns nothing on the lowest and on the middle level.
NODES = ("a", "a", "a", "b", "b", "c", "c")


class Votes:
    """Ranks that vote in one group, and the outcome of each."""

    def __init__(self, seed: int = 0) -> None:
        members = tuple(Member(worker=f"{node}/{rank}", host="h", state_port=1) for rank, node in enumerate(NODES))
        plan = GenerationPlan(term=1, generation=1, members=members)
        self.timeline, self.rng = Timeline(), Random(seed)
        self.group = LeveledGroup(
            plan, self.timeline, self.rng, (0.001, 0.01), DataPlane(), fan_out=2, climbs=self.climbs
        )
        self.ranks = [Voter(worker, self) for worker in plan.workers]
        #: The number of completed levels after which a rank dies.
        self.dies: dict[str, int] = {}
        self.climbed: dict[str, int] = {}

    def vote(self, *, but: int | None = None) -> None:
        for number, rank in enumerate(self.ranks):
            if number != but:
                rank.operation = self.group.issue(rank, "vote", 1, 1 << number, sum)
        while self.timeline.step():
            pass

    def climbs(self, worker: str, operation: Underway) -> bool:
        self.climbed[worker] = self.climbed.get(worker, 0) + 1
        if self.dies.get(worker) == self.climbed[worker]:
            next(rank for rank in self.ranks if rank.id == worker).alive = False
            self.group.fail(worker)
            return False
        return True


class Voter:
    """One rank."""

    def __init__(self, worker: str, votes: Votes) -> None:
        self.id, self.alive = worker, True
        self.operation: Underway | None = None
        self.value: Any = None
        self.failed = False

    def deliver(self, action: Callable[..., object], *args: Any) -> None:
        if self.alive:
            action(*args)

    def operation_done(self, operation: Underway, value: Any) -> None:
        self.value = value

    def operation_failed(self, operation: Underway) -> None:
        self.failed = True


def test_a_vote_by_levels_gives_every_rank_the_sum() -> None:
    votes = Votes()
    votes.vote()
    assert [rank.value for rank in votes.ranks] == [127] * 7


@pytest.mark.parametrize("absent", range(7))
def test_no_rank_passes_if_one_vote_is_missing(absent: int) -> None:
    votes = Votes()
    votes.vote(but=absent)
    assert [rank.value for rank in votes.ranks] == [None] * 7
    assert all(rank.operation is None or rank.operation.value is None for rank in votes.ranks)


def needs(level: int, dead: int) -> set[int]:
    """Return the ranks that cannot pass if a rank dies after `level` levels."""
    levels = [compute_levels(NODES, rank, flat_up_to=1, fan_out=2) for rank in range(len(NODES))]
    stuck = {dead}
    for number in range(level, len(levels[0].owners)):
        on_it = {rank: mine.groups[number] for rank, mine in enumerate(levels) if number < len(mine.groups)}
        stuck |= {rank for rank, group in on_it.items() if stuck & set(group)}
    for number, owners in reversed(list(enumerate(levels[0].owners))):
        on_level = {rank: mine.groups[number] for rank, mine in enumerate(levels) if number < len(mine.groups)}
        stuck |= {rank for rank, group in on_level.items() if len(group) > owners and stuck & set(group)}
    return stuck


@pytest.mark.parametrize(("dead", "level"), [(0, 1), (1, 1), (4, 1), (0, 2), (1, 2), (5, 2), (2, 1)])
def test_a_rank_that_dies_between_levels_stops_the_ranks_that_need_it(dead: int, level: int) -> None:
    passed: set[int] = set()
    for seed in range(20):
        votes = Votes(seed)
        votes.dies = {votes.ranks[dead].id: level}
        votes.vote()
        alone = {number for number, rank in enumerate(votes.ranks) if rank.value is not None}
        assert {votes.ranks[number].value for number in alone} <= {127}
        assert not alone & needs(level, dead)
        passed |= alone
    # Every rank that has received its share may pass.
    assert passed == set(range(7)) - needs(level, dead)
