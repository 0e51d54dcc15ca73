"""The steps that each member has applied, whether the members agree, and which steps are committed."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from holdfast.coordination.progress.worker_progress import WorkerProgress
from holdfast.protocol.commit import Commit, step_weight
from holdfast.protocol.layouts.layout import are_of_same_role
from holdfast.protocol.messages.agent import KeptStep
from holdfast.protocol.messages.worker import Applied, Report
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import PassedStep

#: A report of a step further beyond the journal's than this is rejected: that would be months of training.
MAX_BEYOND = 1 << 22
#: The shortest possible step: even a single rank that computes next to nothing takes several times as long.
LEAST_STEP_S = 2e-4
#: the number of unknown steps that is plausible whatever the clocks show, as clocks of machines may differ by seconds
CLOCKS_APART = 10_000


class DivergedError(Exception):
    """Two replicas have different results of the same step. This violates an invariant and is never tolerated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedStep:
    """One step that all members have applied."""

    #: the number of the step
    step: int
    commit: Commit
    world: int
    #: when the last member applied it
    time: float
    #: the longest pause of its script
    paused_s: float = 0.0


@dataclass(slots=True)
class _Pending:
    commit: Commit
    world: int = 0
    time: float = 0.0
    worker: str = ""
    paused_s: float = 0.0
    #: state hash after the step -> nodes with this hash
    hashes: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    @property
    def of_a_role_that_differs(self) -> list[set[str]]:
        """The nodes with each hash, for the first role in which states differ, or for all roles if none differs."""
        for one in self.hashes:
            same = [nodes for other, nodes in self.hashes.items() if are_of_same_role(one, other)]
            if len(same) > 1:
                return same
        return list(self.hashes.values())


class StepLedger:
    """Collects reports of applied steps. A step is committed when the slowest live member has applied it.

    A report may arrive twice (replayed after a coordinator's outage) and long after the fact.
    """

    def __init__(self, committed: int = 0, passed: Iterable[PassedStep] = ()) -> None:
        """Continue after `committed`.

        `passed` has the known results of later steps, in case their witnesses are dead.
        """
        self.committed = committed
        #: the newest step that a rollback has undone; workers that do not know of the rollback may still report it
        self._undone = 0
        self._worker_progress = WorkerProgress(committed)
        #: the generation with the counted members, and the step that all of them have provably applied
        self._generation = self._proven = 0
        self._steps: dict[int, _Pending] = {}
        #: the first step after which the states of members differ, or 0
        self.differing = 0
        self._members: tuple[str, ...] = ()
        #: up to this step, missing results are unknown to all members; and the number of samples of each such step
        self._given_up = self._samples = 0
        for known in passed:
            self.expect(known.step, known.commit)

    @property
    def unannounced(self) -> tuple[PassedStep, ...]:
        """The steps after the committed ones that have passed, in order.

        A lost result is replaced by an unknown one.
        """
        known = {step: pending.commit for step, pending in self._steps.items()}
        steps = sorted(known.keys() | range(self.committed + 1, self._given_up + 1))
        return tuple(PassedStep(step=step, commit=known.get(step) or _unknown(self._samples)) for step in steps)

    def plausible(self, step: int, seconds: float) -> bool:
        """Return whether a worker may have applied this step `seconds` after the last commit."""
        return step <= max(self.committed, self._undone) + min(MAX_BEYOND, CLOCKS_APART + seconds / LEAST_STEP_S)

    def knows(self, step: int) -> bool:
        """Return whether the result of a step is already known."""
        known = self._steps.get(step)
        return step <= self.committed or (known is not None and not _is_unknown(known))

    def expect(self, step: int, commit: Commit) -> None:
        """Record that a step has passed with this result. Which workers have applied it is still unknown."""
        if step > self.committed:
            self._steps.setdefault(step, _Pending(commit))

    def record_decision(self, step: int, commit: Commit) -> None:
        """Record the decision to finish a step with this result, which also replaces the flags of an earlier report of
        the step.

        No effect on a committed step.
        """
        self.expect(step, commit)
        if step > self.committed:
            self._steps[step].commit = commit

    def add_report(self, message: Applied, now: float) -> None:
        """Record that a worker has applied a step, with its result and state hash, received at `now`. In the current
        generation, that also proves that all members had applied the previous step.

        Different state hashes are only noted (`differing`).

        Raises:
            DivergedError: The result differs from another worker's for the same step, which is not committed yet.
        """
        self.record_step(message.worker, message.step)
        news = _Pending(message.commit, message.world, now, message.worker, message.paused_s)
        self._learn(message.step, news, message.state_hash)
        self.prove(message.step, message.generation)

    def learn(self, kept: KeptStep, worker: str, time: float) -> None:
        """Record a step that an agent has kept; `worker` has applied it at `time` (Unix seconds).

        Raises:
            DivergedError: The result differs from the known one.
        """
        self._learn(kept.step, _Pending(kept.commit.as_commit, kept.world, time, worker), kept.state_hash)
        self.prove(kept.step, kept.generation)

    def give_up_to(self, step: int, global_batch: int) -> None:
        """Record that a node no longer has the results of the steps up to this one; other nodes may have them.

        Args:
            global_batch: The number of samples of each such step.
        """
        self._given_up, self._samples = max(self._given_up, step), global_batch

    def _learn(self, step: int, news: _Pending, state_hash: str) -> None:
        """Record the result, time and state hash of a step, or compare the result with the known one.

        If state hashes of one role differ, record the first such step. Committed steps are ignored.

        Raises:
            DivergedError: The result differs from the known one.
        """
        if step <= self.committed:
            return
        known = self._steps.get(step)
        if known is None or _is_unknown(known):
            known = self._steps[step] = news
        elif _bits(known.commit) != _bits(news.commit):
            raise DivergedError(
                f"step {step}: {known.worker} and {news.worker} differ ({known.commit} against {news.commit})"
            )
        # A node reports one hash for its workers.
        if state_hash:
            known.hashes.setdefault(state_hash, set()).add(node_of(news.worker))
            if sum(are_of_same_role(state_hash, other) for other in known.hashes) > 1:
                self.differing = min(step, self.differing or step)
        known.time = max(known.time, news.time)
        known.world = known.world or news.world
        known.paused_s = max(known.paused_s, news.paused_s)

    def describe_divergence(self) -> str:
        """Return a message that names the nodes with differing states, or "" if none differ.

        "" also while other members may still report that step. The minority is named, or all if there is none.
        """
        known = self._steps.get(self.differing)
        if known is None:
            return ""
        *fewer, most = sorted(known.of_a_role_that_differs, key=len)
        odd = set[str]().union(*fewer)
        if self._may_get_hashes(odd | most) and max(self._steps) == self.differing:
            return ""
        if len(odd) < len(most):
            what, suspects = f"differs from that of the {len(most)} other nodes", odd
        else:
            what, suspects = "differ, and nothing shows which is right", odd | most
        where = ", ".join(sorted(suspects))
        return (
            f"step {self.differing}: the state of {where} {what}. The likely cause is the script, if it changes state "
            "on one worker alone or keeps some outside the model, the optimizer's state_dict() and extra. Otherwise, "
            "test the memory and the accelerators of these nodes"
        )

    def _may_get_hashes(self, reported: set[str]) -> bool:
        """Return whether a worker of another node has not reached the step after which states differ.

        A worker reports its hash before it counts as having reached the step. One that received its state from another
        node has no hash.
        """
        elsewhere = (worker for worker in self._members if node_of(worker) not in reported)
        return any((self._worker_progress.of(worker) or 0) < self.differing for worker in elsewhere)

    def prove(self, step: int, generation: int) -> None:
        """Record that a step has passed in a generation, so that all members had applied the previous one."""
        if generation == self._generation:
            self._proven = max(self._proven, step - 1)

    @property
    def proven(self) -> int:
        """The newest step that all members have provably applied, or 0."""
        return self._proven

    def record_step(self, worker: str, step: int) -> None:
        """Record that a worker has the state of `step`, from any source."""
        self._worker_progress.record_step((worker,), step)

    def record_steps(self, workers: Iterable[str], step: int) -> None:
        """Record that these workers have the state of `step`."""
        self._worker_progress.record_step(workers, step)

    def forget(self, worker: str) -> None:
        """Remove a worker that is gone, so that the others no longer wait for it."""
        self._worker_progress.forget(worker)

    def applied_by(self, worker: str) -> int | None:
        """Return the newest step that a worker is known to have applied."""
        return self._worker_progress.of(worker)

    def add_final_reports(self, reports: Collection[Report], global_batch: int) -> None:
        """Record the steps of all members, and fill in steps that passed although all their witnesses are dead.

        Call it once all messages of all members have arrived: a result that is still missing is lost. A report contains
        the result of its last step. Of earlier steps only the number of samples is certain; their loss is NaN.
        """
        top = 0
        for report in reports:
            if report.applied is not None:
                self.record_step(report.worker, report.applied)
                top = max(top, report.applied)
        for report in reports:
            if report.passed is not None and report.passed.step <= top:
                self.expect(report.passed.step, report.passed.commit)
        self.give_up_to(top, global_batch)

    def slowest(self, workers: Iterable[str]) -> int:
        """Return the newest step that all these workers have applied."""
        return self._worker_progress.slowest(workers)

    @property
    def due(self) -> bool:
        """Whether all members are known to have applied the next step."""
        return self._worker_progress.all_beyond

    @property
    def all_at_committed(self) -> bool:
        """Whether all members have exactly the state of the committed step."""
        return self._worker_progress.all_there

    def undo_after(self, step: int) -> None:
        """Forget the results of steps after `step`, as decided, and the positions of workers beyond it: their state is
        void until they receive that of `step`.
        """
        self._steps = {known: pending for known, pending in self._steps.items() if known <= step}
        self.differing = self.differing if self.differing <= step else 0
        self._given_up = min(self._given_up, step)
        self._worker_progress.go_back(step)

    def reset(self, step: int) -> None:
        """Roll back to `step`, which is then the committed one: forget all results and the workers' positions.

        Workers may still report undone steps.
        """
        self._undone = max(self._undone, self.committed)
        self.committed = step
        self._worker_progress.reset(step)
        self._steps.clear()
        self._given_up = self.differing = 0

    def follow(self, generation: int, members: Collection[str]) -> None:
        """From now on, the members of this generation decide which steps are committed. None is proven for it yet."""
        self._generation, self._proven = generation, 0
        self._members = tuple(members)
        self._worker_progress.follow(members)

    def without(self, workers: Collection[str]) -> None:
        """Remove these workers from the counted members, so that no step waits for them."""
        self._members = tuple(worker for worker in self._members if worker not in workers)
        self._worker_progress.follow(self._members)

    def more_than(self, at_most: int, *, up_to: int) -> bool:
        """Return whether the uncommitted steps up to this one count as more than `at_most`: a step with large logs
        counts as several (`step_weight`).
        """
        if up_to - self.committed > at_most:
            return True
        pending = (self._steps.get(step) for step in range(self.committed + 1, up_to + 1))
        return sum(1 if step is None else step_weight(step.commit) for step in pending) > at_most

    def release(self, at_most: int = sys.maxsize, *, up_to: int = 0) -> list[CommittedStep]:
        """Return the steps that all members have newly applied, in order, and count them as committed.

        It stops at a step without a known result, at one after which states differ, and at a member with an unknown
        step.

        Args:
            at_most: The limit of their weights; steps with large logs count as several. The last step may exceed it.
            up_to: The step that all members have provably applied, whatever they have reported.
        """
        out: list[CommittedStep] = []
        room = at_most
        while room > 0 and (self._worker_progress.all_beyond or self.committed < up_to):
            if self.committed + 1 == self.differing:
                break
            done = self._steps.pop(self.committed + 1, None)
            if done is None:
                if self.committed >= self._given_up:
                    break
                done = _Pending(_unknown(self._samples))
            self.committed += 1
            self._worker_progress.ask_next()
            commit = done.commit
            room -= step_weight(commit)
            out.append(
                CommittedStep(
                    step=self.committed, commit=commit, world=done.world, time=done.time, paused_s=done.paused_s
                )
            )
        return out


def _unknown(samples: int) -> Commit:
    return Commit(grad_square=math.nan, loss_sum=math.nan, samples=samples, nonfinite=0, sample_hashes=-1)


def _is_unknown(pending: _Pending) -> bool:
    return pending.commit.sample_hashes < 0


def _bits(commit: Commit) -> bytes:
    """Return the bytes of a result, to compare it exactly: a NaN equals itself here."""
    return msgspec.msgpack.encode(commit)
