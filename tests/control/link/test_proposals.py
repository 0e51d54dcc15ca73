"""Agreement in a replica group, in every order of loads and stores, with deaths in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import pytest

from holdfast.control.link.replica_group.proposals import ProposalTable, count_words
from holdfast.protocol.layouts.proposals import Proposal, ProposalKind

A, B, C = Proposal(1, 1, 0), Proposal(1, 1, 1), Proposal(2, 1, 0)
Value = int | str | None
Outcomes = tuple[tuple[bool, ...], ...]


class _Next(Exception):
    """Interrupts a run at its next operation, until the operation's result is known."""


@dataclass(frozen=True)
class Life:
    """The results of a rank's operations so far, which are all that it can know."""

    results: tuple[Value, ...] = ()
    alive: bool = True


@dataclass(frozen=True)
class World:
    memory: tuple[int, ...]
    lives: tuple[Life, ...]
    #: The local rank that holds the lock.
    holder: int | None = None


@dataclass(frozen=True)
class Step:
    """One operation that other ranks can come before or after."""

    what: str
    at: int = 0
    value: int = 0


class Run:
    """Runs a rank from its beginning, as far as its results reach."""

    def __init__(self, world: World, place: int, script: Sequence[Proposal]) -> None:
        self._results = iter(world.lives[place].results)
        self.outcomes: list[bool] = []
        self.pending: Proposal | None = None
        self.next: Step | None = None
        table = ProposalTable(self, self, place=place, places=len(world.lives), sleep=lambda _: self._do(Step("sleep")))
        try:
            for proposal in script:
                self.pending = proposal
                self.outcomes.append(table.agree(proposal, self._wanted))
                self.pending = None
        except _Next as step:
            self.next = step.args[0]

    def _do(self, step: Step) -> Value:
        for result in self._results:
            return result
        raise _Next(step)

    def _wanted(self) -> bool:
        return bool(self._do(Step("wanted")))

    def __getitem__(self, index: int, /) -> int:
        return int(self._do(Step("load", index)) or 0)

    def __setitem__(self, index: int, value: int, /) -> None:
        self._do(Step("store", index, value))

    def __enter__(self) -> None:
        self._do(Step("lock"))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not _Next:
            self._do(Step("unlock"))


class Explorer:
    """Explores all reachable states of a replica group.

    Args:
        scripts: the proposals of each local rank, in order.
        wants: the values that `still_wanted` may return.
        deaths: how many ranks may be killed, at any point.
    """

    def __init__(self, scripts: Sequence[Sequence[Proposal]], wants: Sequence[bool], deaths: int = 0) -> None:
        self.scripts, self.wants, self.deaths = scripts, wants, deaths
        start = World((0,) * count_words(len(scripts)), (Life(),) * len(scripts))
        self.before: dict[World, set[World]] = {start: set()}
        self.ends: list[World] = []
        queue = deque([start])
        while queue:
            world = queue.popleft()
            runs = [Run(world, place, script) for place, script in enumerate(scripts)]
            self.check(world, runs)
            found = list(self.successors(world, runs))
            if not found:
                self.check_end(world, runs)
                self.ends.append(world)
            for after in found:
                if after not in self.before:
                    self.before[after] = set()
                    queue.append(after)
                self.before[after].add(world)

    def successors(self, world: World, runs: list[Run]) -> Iterator[World]:
        for place, (life, run) in enumerate(zip(world.lives, runs, strict=True)):
            if not life.alive or run.next is None:
                continue
            if sum(not one.alive for one in world.lives) < self.deaths:
                holder = None if world.holder == place else world.holder
                yield self.put(replace(world, holder=holder), place, replace(life, alive=False))
            yield from self.done(world, place, life, run.next)

    def done(self, world: World, place: int, life: Life, step: Step) -> Iterator[World]:
        """Yield each state that a rank's next operation can lead to."""

        def result(value: Value, world: World = world) -> World:
            return self.put(world, place, replace(life, results=shortened((*life.results, value))))

        match step.what:
            case "lock":
                if world.holder is None:
                    yield result(None, replace(world, holder=place))
            case "unlock":
                assert world.holder == place
                yield result(None, replace(world, holder=None))
            case "load":
                yield result(world.memory[step.at])
            case "store":
                assert world.holder == place, "a store outside the lock"
                memory = (*world.memory[: step.at], step.value, *world.memory[step.at + 1 :])
                yield result(None, replace(world, memory=memory))
            case "wanted":
                for wants in self.wants:
                    yield result(wants)
            case _:
                yield result("asleep")

    def put(self, world: World, place: int, life: Life) -> World:
        return replace(world, lives=(*world.lives[:place], life, *world.lives[place + 1 :]))

    def check(self, world: World, runs: list[Run]) -> None:
        """All ranks agree or none does.

        What one rank has agreed on, each live rank has agreed on or is about to learn, and every rank has proposed it.
        """
        agreed = [
            [one for one, went in zip(script, run.outcomes, strict=False) if went]
            for script, run in zip(self.scripts, runs, strict=True)
        ]
        longest = max(agreed, key=len)
        for place, (mine, run) in enumerate(zip(agreed, runs, strict=True)):
            assert mine == longest[: len(mine)], (world, agreed)
            missing = longest[len(mine) :]
            if missing and world.lives[place].alive:
                assert missing == [run.pending], (world, agreed)
            assert all(one in self.scripts[place] for one in longest)

    def check_end(self, world: World, runs: list[Run]) -> None:
        """No live rank is stuck, whichever ranks have died."""
        assert not [run for life, run in zip(world.lives, runs, strict=True) if life.alive and run.next], world

    def outcomes(self) -> set[Outcomes]:
        """The possible outcomes."""
        return {
            tuple(tuple(Run(world, place, script).outcomes) for place, script in enumerate(self.scripts))
            for world in self.ends
        }

    def always_ends(self) -> bool:
        """Return whether every state can reach an end."""
        seen, queue = set(self.ends), deque(self.ends)
        while queue:
            for world in self.before[queue.popleft()]:
                if world not in seen:
                    seen.add(world)
                    queue.append(world)
        return len(seen) == len(self.before)


def shortened(results: tuple[Value, ...]) -> tuple[Value, ...]:
    """A check of the page without a result leaves a rank unchanged, so drop the repetition."""
    if len(results) > 4 and results[-3:-1] == (True, "asleep") and results[-1] == results[-4]:
        return results[:-3]
    return results


def ends(scripts: Sequence[Sequence[Proposal]], wants: Sequence[bool], deaths: int = 0) -> set[Outcomes]:
    explorer = Explorer(scripts, wants, deaths)
    assert explorer.ends
    return explorer.outcomes()


@pytest.mark.parametrize(("places", "script"), [(2, [A, B]), (3, [A])])
def test_all_ranks_agree_if_all_keep_wanting_the_same_proposal(places: int, script: list[Proposal]) -> None:
    explorer = Explorer([script] * places, wants=[True])
    assert explorer.outcomes() == {((True,) * len(script),) * places}
    assert explorer.always_ends()


@pytest.mark.parametrize("places", [2, 3])
def test_all_ranks_agree_or_none_does_if_some_withdraw(places: int) -> None:
    assert ends([[A]] * places, wants=[True, False]) == {((went,),) * places for went in (True, False)}


def test_a_withdrawn_proposal_can_be_proposed_again() -> None:
    found = ends([[A, A], [A, A]], wants=[True, False])
    assert {((False, False), (False, False)), ((True, True), (True, True)), ((False, True), (True, False))} <= found


def test_a_rank_that_is_ahead_waits_while_the_rank_behind_withdraws() -> None:
    """Local rank 0 repeats a micro-batch in generation 2 while rank 1 still waits for it in generation 1."""
    assert ends([[C], [A, C]], wants=[True, False]) >= {((True,), (False, True)), ((False,), (False, False))}
    assert not [end for end in ends([[C], [A, C]], wants=[True, False]) if end[1][0]]


@pytest.mark.parametrize(("one", "other"), list(permutations([A, B, C, Proposal(1, 1, 0, ProposalKind.SHADOW)], 2)))
def test_different_proposals_are_never_agreed(one: Proposal, other: Proposal) -> None:
    assert ends([[one], [other]], wants=[True, False]) == {((False,), (False,))}
    explorer = Explorer([[one], [other]], wants=[True])
    assert explorer.ends == []


@pytest.mark.parametrize("scripts", [[[A, B]] * 2, [[A]] * 3, [[C], [A, C]]], ids=["2 places", "3 places", "one ahead"])
def test_a_rank_killed_at_any_point_blocks_no_other_rank(
    scripts: Sequence[Sequence[Proposal]],
) -> None:
    explorer = Explorer(scripts, wants=[True, False], deaths=1)
    assert explorer.always_ends()
    assert len(explorer.before) > 300


def test_the_explorer_finds_a_withdrawal_that_is_not_atomic(monkeypatch: pytest.MonkeyPatch) -> None:
    """This proves that the test can fail: a check outside the lock may miss the last proposal."""

    def withdraw(table: ProposalTable) -> bool:
        if table.check_agreed():
            return False
        with table._lock:
            table._words[table._own_slot] = 0
        table._number = 0
        return True

    monkeypatch.setattr(ProposalTable, "withdraw", withdraw)
    with pytest.raises(AssertionError):
        ends([[A], [A]], wants=[True, False])
