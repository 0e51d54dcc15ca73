"""Finds out who holds a job up: asks all nodes where their workers stand, and acts on what that shows.

A worker that hangs is ended by its agent, which starts another; a node that does not answer while others wait for it
is given up; where all wait for each other they look who cannot be reached, and try again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.seen import hangs, node_lost, process_ended
from holdfast.coordination.generations.stopping import Stopping
from holdfast.coordination.inputs import Failure
from holdfast.coordination.lateness.judge import Standstill, judge, what_hangs
from holdfast.coordination.lateness.own_work import AGAIN_LONGER, OwnWork
from holdfast.coordination.lateness.pace import Answers, Pace
from holdfast.coordination.lateness.stories import Stories
from holdfast.coordination.lateness.stragglers import Stragglers
from holdfast.coordination.membership import Node
from holdfast.coordination.nodes.absences import Absences
from holdfast.coordination.recovery.failures import Failures
from holdfast.coordination.telling.memories import Memories
from holdfast.coordination.timing.times import UNKNOWN_S
from holdfast.coordination.turn import Transaction
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages.agent import WorkerDown
from holdfast.protocol.messages.orders import LookAround
from holdfast.protocol.messages.progress import EndHung, Late, Probe, ProbeAnswer, Stacks, ThreadActivity, WatchWork
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan

#: one answer serves all that is asked within this time; where nothing comes of it, it is asked ever more seldom
FRESH_S = 0.25
SELDOM = 0.5
#: nodes that may be asked within a second
ASKED_PER_S = 2000
#: a report is on its way for milliseconds; whoever owes one for longer is asked after
REPORT_S = 0.25
#: an agent ends a process in milliseconds; what it was told is told again after this time
OBEYS_S = 1.0
#: a tick that comes so many times as late as it should: this process did not run, or its store was slow
LONG_TICK = 3.0


@dataclass(slots=True)
class RollCall:
    """Who was asked where the workers stand at a time (unix seconds), and what the answers were."""

    number: int
    at: float
    asked: frozenset[str]
    stands: dict[str, ThreadActivity] = field(default_factory=dict[str, ThreadActivity])
    answered: set[str] = field(default_factory=set[str])

    @property
    def complete(self) -> bool:
        """True where all that were asked have answered."""
        return len(self.answered) == len(self.asked)


@dataclass(slots=True)
class _Accused:
    stand: ThreadActivity
    at: float


class Inquiry:
    """Of one job. What it remembers is no more than a coordinator may forget."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        failures: Failures,
        stopping: Stopping,
        absences: Absences,
    ) -> None:
        self.pace = Pace()
        self.stragglers = Stragglers()
        self._transaction = transaction
        self._config = config
        self._failures = failures
        self._stopping = stopping
        self._absences = absences
        self._generation: int = 0
        self._question: RollCall | None = None
        self._number = 0
        self._asks_at = self._ticked = 0.0
        #: nodes that were asked, and have said nothing since
        self._silent_since: dict[str, float] = {}
        self._answers = Answers()
        #: the generation whose members were told to look around
        self._looked = 0
        #: workers that are being ended
        self._accused: dict[str, _Accused] = {}
        self._own_work = OwnWork(transaction)
        self._unknown_s = UNKNOWN_S
        self._stories = Stories(transaction)
        self.memories = Memories(transaction)

    @property
    def newest(self) -> RollCall | None:
        """The newest question that was put since the job stands at its step, with what was answered."""
        question = self._question
        return question if question is not None and question.at >= self.pace.since else None

    def lines_of(self, worker: str) -> tuple[str, ...]:
        """Return the lines at which a worker's threads stood, where it was asked for them lately."""
        return self._stories.lines_of(worker)

    # ---- what is heard ----

    def late(self, node: Node, late: Late) -> None:
        """A worker of a node is late."""
        plan, stand, question = self._transaction.record.plan, late.stand, self._question
        if node_of(stand.worker) != node.name or plan is None or plan.rank(stand.worker) is None:
            return
        if late.ended:
            self._own_work.ended(stand)
            return
        if question is None or question.at + FRESH_S < self._transaction.now:
            self._ask()
        elif stand.worker in question.stands:
            question.stands[stand.worker] = stand
            self._judge()

    def told(self, node: Node, answer: ProbeAnswer) -> None:
        """A node says where its workers stand."""
        now = self._transaction.now
        self._answers.came(node.name, now - self._silent_since.pop(node.name, now), now)
        question = self._question
        if question is None or answer.number != question.number or node.name not in question.asked:
            return
        question.answered.add(node.name)
        question.stands.update((stand.worker, stand) for stand in answer.stands if node_of(stand.worker) == node.name)
        if question.complete:
            self._judge()  # (else the next tick does, by what is known: not each of a thousand answers)

    def explained(self, node: Node, stacks: Stacks) -> None:
        """A node says where its workers' threads stand in their programs."""
        self._stories.told(node, stacks)

    def ended(self, node: Node, down: WorkerDown) -> Failure:
        """A worker has ended: return what failed, which is what it was ended for, where it was."""
        accused = self._accused.pop(down.worker, None)
        if accused is None or down.kind is not FailureKind.HANG:
            return process_ended(node.name, down, self._transaction.now)
        return hangs(node.name, accused.stand, down.detail, self._transaction.now)

    # ---- time ----

    def tick(self) -> None:
        """Look whether the job goes on, and ask where it does not."""
        transaction, plan = self._transaction, self._transaction.record.plan
        self._stories.tick()
        self.memories.tick()
        self._failures.take(*self._stopping.silent(self._absences.promised, self._config.report_timeout_s))
        if plan is None or not self._config.spec.experiments.watch:
            return
        now = transaction.now
        away_s, self._ticked = now - self._ticked, now
        if away_s > LONG_TICK * self._config.tick_s:  # (a store was slow: answers may wait to be read)
            self._silent_since = {name: since + away_s for name, since in self._silent_since.items()}
        self._follow(plan)
        if self._question is not None and not self._question.complete:
            self._judge()
        if now >= self._asks_at and self._asks:
            self._ask()

    def wait_anew(self) -> None:
        """The coordinator was away: what it has not heard says nothing."""
        self._stopping.wait_anew()
        self._question = None
        self._silent_since.clear()
        self.pace.wait_anew(self._transaction.now)

    def _follow(self, plan: GenerationPlan) -> None:
        transaction = self._transaction
        if plan.generation != self._generation:
            self._generation, self._question, self._asks_at = plan.generation, None, 0.0
            self._silent_since.clear()
            self.pace.began(len(plan.members), transaction.now)
            self.stragglers.follow(transaction.members.nodes.keys())
        if transaction.members.entered(plan):
            self.pace.entered(transaction.now)
        self._own_work.tick(transaction.position.step)

    @property
    def _asks(self) -> bool:
        """Tell whether something takes so long that it is time to ask."""
        now, stopping = self._transaction.now, self._stopping
        if stopping.stop is not None:
            return now - stopping.since > REPORT_S and bool(stopping.awaited(frozenset()))
        return self.pace.asks(now)

    # ---- asking, and what comes of it ----

    def _ask(self) -> None:
        transaction, stopping = self._transaction, self._stopping
        nodes = transaction.members.nodes
        here = [nodes[name] for name in dict.fromkeys(map(node_of, transaction.planned)) if name in nodes]
        self._number += 1
        self._question = RollCall(self._number, transaction.now, frozenset(node.name for node in here))
        self._answers.keep(self._question.asked)
        self._silent_since = {node.name: self._silent_since.get(node.name, transaction.now) for node in here}
        still_s = transaction.now - (stopping.since if stopping.stop is not None else self.pace.since)
        again_s = max(FRESH_S, SELDOM * still_s, len(here) / ASKED_PER_S)
        due_s = (at - transaction.now for at in (self.pace.stopped_at, self.pace.overdue_at))
        self._asks_at = transaction.now + min([again_s, *(each for each in due_s if each > 0.0)])
        transaction.broadcast((node.connection for node in here), Probe(number=self._number))

    def _judge(self) -> None:
        """Act on the answers, once all are here that are to be expected."""
        question, transaction, stopping = self._question, self._transaction, self._stopping
        plan = transaction.record.plan
        if question is None or plan is None:
            return
        missing = (question.asked - question.answered) & transaction.members.nodes.keys()
        silent = {name for name in missing if self._is_silent(name)}
        if len(silent) < len(missing):
            return
        recovering = stopping.stop is not None
        workers = transaction.planned if recovering else plan.workers
        finding = judge(
            Standstill(
                members=transaction.members.live(workers),
                stands=question.stands,
                silent=silent,
                idle=stopping.reports.keys() if recovering else (),
                outside=self._outside(plan) if not recovering else (),
                overdue=recovering or transaction.now > self.pace.overdue_at,
                waits_for_stopped=recovering or transaction.now > self.pace.stopped_at,
                together_s=self.pace.together_s,
                unknown_s=self._unknown_s,
            )
        )
        hung = self._to_be_ended(self._own_work.spare(finding.hung))
        looks = finding.network and not recovering and self._looked != plan.generation
        if hung or finding.silent or looks:
            answered = [
                transaction.members.nodes[name] for name in sorted(question.answered & transaction.members.nodes.keys())
            ]
            self._stories.begin(answered, question.stands, [stand.worker for stand in hung] or finding.silent)
        for stand in hung:
            self._end(stand)
        if finding.silent:
            kind, nodes = FailureKind.LEASE_EXPIRED, transaction.members.nodes
            self._failures.take(*(node_lost(name, kind, nodes[name].seen) for name in finding.silent))
        if looks:
            self._looked = plan.generation
            transaction.order_all(plan.workers, LookAround(generation=plan.generation))

    def _outside(self, plan: GenerationPlan) -> list[str]:
        """Return the members that are here and not in their generation yet."""
        infos = (self._transaction.members.worker(worker) for worker in plan.workers)
        return [info.id for info in infos if info is not None and info.entered < plan.generation]

    def _is_silent(self, name: str) -> bool:
        """Tell whether nothing at all has come from a node since it was asked, for longer than it should take."""
        node, now = self._transaction.members.nodes[name], self._transaction.now
        since = self._silent_since.get(name, now)
        return node.seen <= since and now - since > self._answers.patience_s(name, now)

    def _to_be_ended(self, hung: Iterable[ThreadActivity]) -> list[ThreadActivity]:
        """Return those of the workers that hang which no agent was told to end, or not lately."""
        now = self._transaction.now
        known = ((stand, self._accused.get(stand.worker)) for stand in hung)
        return [stand for stand, accused in known if accused is None or now - accused.at > OBEYS_S]

    def _end(self, stand: ThreadActivity) -> None:
        """Have a worker that hangs ended."""
        transaction, connection = self._transaction, self._transaction.members.connection_of(stand.worker)
        if connection is not None:
            if not (stand.limit_s or stand.stopped):  # (it may have been wrong: compiling may take one far longer)
                self._unknown_s *= AGAIN_LONGER
            self._accused[stand.worker] = _Accused(stand, transaction.now)
            why = what_hangs(stand)
            on_trial = self._own_work.accuse(stand, why)
            transaction.send(connection, EndHung(worker=stand.worker, why=why, on_trial=on_trial))
            if on_trial:
                self._watch_work(stand)

    def _watch_work(self, stand: ThreadActivity) -> None:
        """Ask all nodes to report who needs as long for the work at which a worker is ended."""
        watch = WatchWork(step=stand.step, activity=stand.activity, for_s=stand.for_s, micro_batch=stand.micro_batch)
        self._transaction.broadcast((node.connection for node in self._transaction.members.nodes.values()), watch)
