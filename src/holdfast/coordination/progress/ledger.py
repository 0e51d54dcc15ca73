"""Which steps every member has applied, and whether the members agree."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from holdfast.coordination.progress.standings import Standings
from holdfast.protocol.commit import Commit, step_weight
from holdfast.protocol.layouts.layout import are_of_same_role
from holdfast.protocol.messages.agent import KeptStep
from holdfast.protocol.messages.worker import Applied, Report
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import Passed

#: A claim to have applied more steps than this beyond the journal's is none that training leads to: months of it.
MAX_BEYOND = 1 << 22
#: No step takes less time: one of a single rank that computes next to nothing takes several times as long.
LEAST_STEP_S = 2e-4
#: of steps beyond what is known, whatever the clocks show: those of two machines may be seconds apart
CLOCKS_APART = 10_000


class DivergedError(Exception):
    """Two replicas have different v of the same step: a broken invariant, never tolerated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedStep:
    """One step that all members have applied; `time` is the last one's; `paused_s`: its script's longest pause."""

    step: int
    commit: Commit
    world: int
    time: float
    paused_s: float = 0.0


@dataclass(slots=True)
class _Pending:
    commit: Commit
    world: int = 0
    time: float = 0.0
    worker: str = ""
    paused_s: float = 0.0
    #: of the state after the step: the nodes where it has this hash
    hashes: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    @property
    def of_a_role_that_differs(self) -> list[set[str]]:
        """The nodes that have each hash, of the first part of the state of which there are several."""
        for one in self.hashes:
            same = [nodes for other, nodes in self.hashes.items() if are_of_same_role(one, other)]
            if len(same) > 1:
                return same
        return list(self.hashes.values())


class StepLedger:
    """Collects Applied reports; a step is committed when the slowest live member has applied it.

    Reports may come twice (replayed after a coordinator's outage) and long after the fact.
    """

    def __init__(self, committed: int = 0, passed: Iterable[Passed] = ()) -> None:
        """Continue after `committed`; of the steps in `passed` v is known, whoever is left to tell of them."""
        self.committed = committed
        #: the newest step that a roll-back undid: who has not heard of that yet may still tell of it
        self._undone = 0
        self._standings = Standings(committed)
        #: the generation whose members are followed, and the step that a later one's v proves them to have applied
        self._generation = self._proven = 0
        self._steps: dict[int, _Pending] = {}
        #: the first step after which the states of some members differ, 0 where there is none
        self.differing = 0
        self._members: tuple[str, ...] = ()
        #: up to this step, v of those that are missing is known to nobody; and the samples that each of them had
        self._given_up = self._samples = 0
        for known in passed:
            self.expect(known.step, known.commit)

    @property
    def unannounced(self) -> tuple[Passed, ...]:
        """The steps after the committed ones that have passed, in order."""
        known = {step: pending.commit for step, pending in self._steps.items()}
        steps = sorted(known.keys() | range(self.committed + 1, self._given_up + 1))
        return tuple(Passed(step=step, commit=known.get(step) or _unknown(self._samples)) for step in steps)

    def plausible(self, step: int, seconds: float) -> bool:
        """Tell whether somebody may have applied this step, so many seconds after the one that was committed last."""
        return step <= max(self.committed, self._undone) + min(MAX_BEYOND, CLOCKS_APART + seconds / LEAST_STEP_S)

    def knows(self, step: int) -> bool:
        """Tell whether nothing new can be told of a step."""
        known = self._steps.get(step)
        return step <= self.committed or (known is not None and not _is_unknown(known))

    def expect(self, step: int, commit: Commit) -> None:
        """A step has passed with this v; who applies it is still to be heard."""
        if step > self.committed:
            self._steps.setdefault(step, _Pending(commit))

    def decided(self, step: int, commit: Commit) -> None:
        """It was decided to finish a step with this v: what was raised where it passed does not count, unless here."""
        self.expect(step, commit)
        if step > self.committed:
            self._steps[step].commit = commit

    def note(self, message: Applied, now: float) -> None:
        """Take in one worker's report, heard now.

        Raises:
            DivergedError: the worker's v differs from another's.
        """
        self.settle(message.worker, message.step)
        news = _Pending(message.commit, message.world, now, message.worker, message.paused_s)
        self._learn(message.step, news, message.state_hash)
        self.prove(message.step, message.generation)

    def learn(self, kept: KeptStep, worker: str, time: float) -> None:
        """Take in what an agent has kept of a step; `worker`: one who has applied it, at `time` (unix seconds).

        Raises:
            DivergedError: v differs from that which others told.
        """
        self._learn(kept.step, _Pending(kept.commit.as_commit, kept.world, time, worker), kept.state_hash)
        self.prove(kept.step, kept.generation)

    def give_up_to(self, step: int, global_batch: int) -> None:
        """Nobody on some node knows v of the steps up to this one any more; others may."""
        self._given_up, self._samples = max(self._given_up, step), global_batch

    def _learn(self, step: int, news: _Pending, state_hash: str) -> None:
        if step <= self.committed:
            return
        known = self._steps.get(step)
        if known is None or _is_unknown(known):
            known = self._steps[step] = news
        elif _bits(known.commit) != _bits(news.commit):
            raise DivergedError(
                f"step {step}: {known.worker} and {news.worker} differ ({known.commit} against {news.commit})"
            )
        if state_hash:  # (a node tells its workers' hash once)
            known.hashes.setdefault(state_hash, set()).add(node_of(news.worker))
            if sum(are_of_same_role(state_hash, other) for other in known.hashes) > 1:
                self.differing = min(step, self.differing or step)
        known.time = max(known.time, news.time)
        known.world = known.world or news.world
        known.paused_s = max(known.paused_s, news.paused_s)

    def diverged(self) -> str:
        """Say after which step which nodes' states differ, once all have told theirs; "" where they do not."""
        known = self._steps.get(self.differing)
        if known is None:
            return ""
        *fewer, most = sorted(known.of_a_role_that_differs, key=len)
        odd = set[str]().union(*fewer)
        if self._more_will_tell(odd | most) and max(self._steps) == self.differing:
            return ""
        if len(odd) < len(most):
            what, suspects = f"is not that of the {len(most)} others", odd
        else:
            what, suspects = "differ, and which is right nobody can say", odd | most
        where = ", ".join(sorted(suspects))
        return (
            f"step {self.differing}: the state of {where} {what}: the likely cause is the script, if it changes state "
            "on one worker alone or keeps some outside the model, the optimizer's state_dict() and extra; if it does "
            "not, test the memory and the accelerators of these nodes"
        )

    def _more_will_tell(self, told: set[str]) -> bool:
        """Tell whether somebody elsewhere has not come to the step yet after which states differ.

        Whoever has tells its hash first; whose state came from another node never has one.
        """
        elsewhere = (worker for worker in self._members if node_of(worker) not in told)
        return any((self._standings.of(worker) or 0) < self.differing for worker in elsewhere)

    def prove(self, step: int, generation: int) -> None:
        """A step has passed in a generation: all of its members had applied the one before."""
        if generation == self._generation:
            self._proven = max(self._proven, step - 1)

    @property
    def proven(self) -> int:
        """The newest step that a later one proves all members to have applied, 0 where there is none."""
        return self._proven

    def settle(self, worker: str, step: int) -> None:
        """A worker holds the state of `step` now, by whatever way."""
        self._standings.note((worker,), step)

    def settle_all(self, workers: Iterable[str], step: int) -> None:
        """These workers hold the state of `step` now."""
        self._standings.note(workers, step)

    def forget(self, worker: str) -> None:
        """A worker is gone; its own steps no longer hold the others up."""
        self._standings.forget(worker)

    def applied_by(self, worker: str) -> int | None:
        """Return the newest step that a worker is known to have applied."""
        return self._standings.of(worker)

    def hear(self, reports: Collection[Report], global_batch: int) -> None:
        """Take in where all members stand, and make up for steps that passed, but whose witnesses are all dead.

        To be called when every member's messages are known: what is missing now will not come any more. A report
        still knows v of its last step; of those before only the samples are certain, their loss is NaN.
        """
        top = 0
        for report in reports:
            if report.applied is not None:
                self.settle(report.worker, report.applied)
                top = max(top, report.applied)
        for report in reports:
            if report.passed is not None and report.passed.step <= top:
                self.expect(report.passed.step, report.passed.commit)
        self.give_up_to(top, global_batch)

    def slowest(self, workers: Iterable[str]) -> int:
        """Return the newest step that all these workers have applied."""
        return self._standings.slowest(workers)

    @property
    def due(self) -> bool:
        """True where all members are known to have applied the next step."""
        return self._standings.all_beyond

    @property
    def all_at_committed(self) -> bool:
        """True where the members hold the state of the committed step, all of them, and of no later one."""
        return self._standings.all_there

    def undo_after(self, step: int) -> None:
        """A decision undoes what came after `step`: who applied it alone is expelled, its v void."""
        self._steps = {known: pending for known, pending in self._steps.items() if known <= step}
        self.differing = self.differing if self.differing <= step else 0
        self._given_up = min(self._given_up, step)
        self._standings.go_back(step)

    def reset(self, step: int) -> None:
        """Go back: what came after `step` never counted."""
        self._undone = max(self._undone, self.committed)
        self.committed = step
        self._standings.reset(step)
        self._steps.clear()
        self._given_up = self.differing = 0

    def follow(self, generation: int, members: Collection[str]) -> None:
        """This generation is in force from now on, these are its members."""
        self._generation, self._proven = generation, 0
        self._members = tuple(members)
        self._standings.follow(members)

    def without(self, workers: Collection[str]) -> None:
        """These count no more: nobody waits for them."""
        self._members = tuple(worker for worker in self._members if worker not in workers)
        self._standings.follow(self._members)

    def more_than(self, at_most: int, *, up_to: int) -> bool:
        """Tell whether the steps after the committed one, up to this one, count as more than so many."""
        if up_to - self.committed > at_most:
            return True
        pending = (self._steps.get(step) for step in range(self.committed + 1, up_to + 1))
        return sum(1 if step is None else step_weight(step.commit) for step in pending) > at_most

    def release(self, at_most: int = sys.maxsize, *, up_to: int = 0) -> list[CommittedStep]:
        """Return the steps newly applied by all members, in order; members not heard of hold everything up.

        Args:
            at_most: how many, where those that log much count as several; the last one may be more than is left.
            up_to: so far everybody is, whatever was heard of each.
        """
        out: list[CommittedStep] = []
        room = at_most
        while room > 0 and (self._standings.all_beyond or self.committed < up_to):
            if self.committed + 1 == self.differing:
                break
            done = self._steps.pop(self.committed + 1, None)
            if done is None:
                if self.committed >= self._given_up:
                    break
                done = _Pending(_unknown(self._samples))
            self.committed += 1
            self._standings.ask_next()
            step, v, paused_s = self.committed, done.commit, done.paused_s
            room -= step_weight(v)
            out.append(CommittedStep(step=step, commit=v, world=done.world, time=done.time, paused_s=paused_s))
        return out


def _unknown(samples: int) -> Commit:
    return Commit(grad_square=math.nan, loss_sum=math.nan, samples=samples, nonfinite=0, sample_hashes=-1)


def _is_unknown(pending: _Pending) -> bool:
    return pending.commit.sample_hashes < 0


def _bits(commit: Commit) -> bytes:
    """Return what identifies v in every bit; a NaN equals itself here."""
    return msgspec.msgpack.encode(commit)
