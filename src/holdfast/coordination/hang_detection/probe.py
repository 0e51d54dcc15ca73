"""Finds out which worker or node holds up a job: it probes all nodes for the activity of their workers, and acts on it.

The agent ends a worker that hangs, and starts another. A node that does not answer while others wait for it is removed.
If all workers wait for each other, they check which peers they can reach, and try again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.coordination.collection.memory_reports import Memories
from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.detections import node_lost, process_ended, worker_hung
from holdfast.coordination.generations.interruption import Interruption
from holdfast.coordination.hang_detection.judge import Standstill, describe_hang, judge_standstill
from holdfast.coordination.hang_detection.own_work import REPEAT_FACTOR, SlowWork
from holdfast.coordination.hang_detection.pace import AnswerTimes, Pace
from holdfast.coordination.hang_detection.stack_dumps import StackDumps
from holdfast.coordination.hang_detection.straggler_scores import WorkerTimes
from holdfast.coordination.inputs import Failure
from holdfast.coordination.membership import Node
from holdfast.coordination.nodes.disconnected_nodes import DisconnectedNodes
from holdfast.coordination.recovery.failures import Failures
from holdfast.coordination.timing.times import UNKNOWN_S
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages.agent import WorkerDown
from holdfast.protocol.messages.orders import LookAround
from holdfast.protocol.messages.progress import EndHung, Late, Probe, ProbeAnswer, Stacks, ThreadActivity, WatchWork
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan

#: seconds for which an answer counts as current
FRESH_S = 0.25
#: Without a result the next probe comes after this part of the standstill, so probes become rarer.
PROBE_BACKOFF = 0.5
#: most nodes that are asked per second
MAX_ASKED_PER_S = 2000
#: seconds after which a missing report leads to a probe; a report takes milliseconds
REPORT_S = 0.25
#: seconds after which the order to end a process is repeated; an agent obeys in milliseconds
END_AGAIN_S = 1.0
#: A tick this many times its interval after the last one shows that this process did not run, or its store was slow.
LONG_TICK = 3.0


@dataclass(slots=True)
class Question:
    """One probe: the nodes that were asked, and their answers."""

    number: int
    #: when it was asked, unix seconds
    at: float
    #: the asked nodes
    asked: frozenset[str]
    #: activities by worker, as answered
    stands: dict[str, ThreadActivity] = field(default_factory=dict[str, ThreadActivity])
    #: the nodes that have answered
    answered: set[str] = field(default_factory=set[str])

    @property
    def is_complete(self) -> bool:
        """Whether all asked nodes have answered."""
        return len(self.answered) == len(self.asked)


@dataclass(slots=True)
class _Ending:
    """A worker that an agent was told to end."""

    stand: ThreadActivity
    at: float


class HangProbe:
    """Hang detection of one job. A new coordinator may start without its memory."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        failures: Failures,
        stopping: Interruption,
        absences: DisconnectedNodes,
    ) -> None:
        self.pace = Pace()
        self.stragglers = WorkerTimes()
        self._transaction = transaction
        self._config = config
        self._failures = failures
        self._stopping = stopping
        self._absences = absences
        self._generation: int = 0
        self._question: Question | None = None
        self._number = 0
        self._next_ask_at = self._ticked = 0.0
        #: since when asked nodes have been silent
        self._silent_since: dict[str, float] = {}
        self._answers = AnswerTimes()
        #: the generation in which members were told to check the network
        self._network_checked = 0
        #: workers that agents were told to end
        self._ending: dict[str, _Ending] = {}
        self._slow_work = SlowWork(transaction)
        self._unknown_s = UNKNOWN_S
        self._stack_dumps = StackDumps(transaction)
        self.memories = Memories(transaction)

    @property
    def newest(self) -> Question | None:
        """The newest question since the job has stood at its step, with its answers; or None."""
        question = self._question
        return question if question is not None and question.at >= self.pace.since else None

    def stack_lines(self, worker: str) -> tuple[str, ...]:
        """Return the lines at which a worker's threads stood in the newest stack dump."""
        return self._stack_dumps.stack_lines(worker)

    # ---- messages ----

    def on_late(self, node: Node, late: Late) -> None:
        """Handle the report that a member is late, or that late work has ended. Reports about other workers are
        ignored.

        A late worker leads to a probe of all nodes; with current answers, they are judged at once. Ended work may clear
        other workers.
        """
        plan, stand, question = self._transaction.record.plan, late.stand, self._question
        if node_of(stand.worker) != node.name or plan is None or plan.rank(stand.worker) is None:
            return
        if late.ended:
            self._slow_work.on_work_ended(stand)
            return
        if question is None or question.at + FRESH_S < self._transaction.now:
            self._send_probe()
        elif stand.worker in question.stands:
            question.stands[stand.worker] = stand
            self._act_on_answers()

    def on_answer(self, node: Node, answer: ProbeAnswer) -> None:
        """Record a node's answer to the newest probe, and judge once all have answered. Learn how fast the node
        answers.
        """
        now = self._transaction.now
        self._answers.on_answer(node.name, now - self._silent_since.pop(node.name, now), now)
        question = self._question
        if question is None or answer.number != question.number or node.name not in question.asked:
            return
        question.answered.add(node.name)
        question.stands.update((stand.worker, stand) for stand in answer.stands if node_of(stand.worker) == node.name)
        if question.is_complete:
            self._act_on_answers()  # Otherwise the next tick does it, not each of a thousand answers.

    def on_stacks(self, node: Node, stacks: Stacks) -> None:
        """Handle the stack dumps of a node's workers."""
        self._stack_dumps.on_stacks(node, stacks)

    def classify_end(self, node: Node, down: WorkerDown) -> Failure:
        """Return the failure of a worker that has ended: the hang for which its agent ended it, or the end of its
        process.
        """
        ending = self._ending.pop(down.worker, None)
        if ending is None or down.kind is not FailureKind.HANG:
            return process_ended(node.name, down, self._transaction.now)
        return worker_hung(node.name, ending.stand, down.detail, self._transaction.now)

    # ---- time ----

    def tick(self) -> None:
        """Handle members without a report in time as failures, and probe all nodes if a step, entry or report takes too
        long.

        Also judge the answers of the last probe that are there, and run the timeouts of stack dumps and memory reports.
        """
        transaction, plan = self._transaction, self._transaction.record.plan
        self._stack_dumps.tick()
        self.memories.tick()
        self._failures.handle(*self._stopping.silent(self._absences.promised, self._config.report_timeout_s))
        if plan is None or not self._config.spec.experiments.watch:
            return
        now = transaction.now
        away_s = now - self._ticked
        self._ticked = now
        if away_s > LONG_TICK * self._config.tick_s:  # Answers may wait to be read.
            self._silent_since = {name: since + away_s for name, since in self._silent_since.items()}
        self._follow_plan(plan)
        if self._question is not None and not self._question.is_complete:
            self._act_on_answers()
        if now >= self._next_ask_at and self._should_ask:
            self._send_probe()

    def restart_waiting(self) -> None:
        """Restart all waiting times and drop the probe: this process did not run, so missing messages prove nothing."""
        self._stopping.restart_timeout()
        self._question = None
        self._silent_since.clear()
        self.pace.restart_waiting(self._transaction.now)

    def _follow_plan(self, plan: GenerationPlan) -> None:
        """Restart the times for a new generation, note when all members have entered, and give due verdicts on slow
        work.
        """
        transaction = self._transaction
        if plan.generation != self._generation:
            self._generation = plan.generation
            self._question = None
            self._next_ask_at = 0.0
            self._silent_since.clear()
            self.pace.on_generation(len(plan.members), transaction.now)
            self.stragglers.keep_nodes(transaction.members.nodes.keys())
        if transaction.members.entered(plan):
            self.pace.on_entered(transaction.now)
        self._slow_work.tick(transaction.position.step)

    @property
    def _should_ask(self) -> bool:
        """Whether a probe is due: a step, an entry or, during an interruption, a member's report takes too long."""
        now, stopping = self._transaction.now, self._stopping
        if stopping.stop is not None:
            return now - stopping.since > REPORT_S and bool(stopping.awaited(frozenset()))
        return self.pace.should_ask(now)

    # ---- probes and their results ----

    def _send_probe(self) -> None:
        """Send a probe to the nodes of all planned workers, in place of an earlier one, and schedule the next.

        The longer the standstill lasts, the rarer are the probes, but one is due when a stopped process counts as hung,
        and one when the step becomes overdue.
        """
        transaction, stopping = self._transaction, self._stopping
        nodes = transaction.members.nodes
        here = [nodes[name] for name in dict.fromkeys(map(node_of, transaction.planned)) if name in nodes]
        self._number += 1
        self._question = Question(self._number, transaction.now, frozenset(node.name for node in here))
        self._answers.keep_nodes(self._question.asked)
        self._silent_since = {node.name: self._silent_since.get(node.name, transaction.now) for node in here}
        still_s = transaction.now - (stopping.since if stopping.stop is not None else self.pace.since)
        again_s = max(FRESH_S, PROBE_BACKOFF * still_s, len(here) / MAX_ASKED_PER_S)
        due_s = (at - transaction.now for at in (self.pace.stopped_at, self.pace.overdue_at))
        self._next_ask_at = transaction.now + min([again_s, *(each for each in due_s if each > 0.0)])
        transaction.broadcast((node.connection for node in here), Probe(number=self._number))

    def _act_on_answers(self) -> None:
        """Judge a probe, once every node has answered or taken too long: end hung workers and remove silent nodes.

        If all wait without a suspect, members check their network, once for each generation. Any of these starts a
        stack dump.
        """
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
        finding = judge_standstill(
            Standstill(
                members=transaction.members.live(workers),
                stands=question.stands,
                silent=silent,
                idle=stopping.reports.keys() if recovering else (),
                outside=self._list_outside(plan) if not recovering else (),
                overdue=recovering or transaction.now > self.pace.overdue_at,
                waits_for_stopped=recovering or transaction.now > self.pace.stopped_at,
                together_s=self.pace.together_s,
                unknown_s=self._unknown_s,
            )
        )
        hung = self._select_to_end(self._slow_work.exclude_slow_work(finding.hung))
        looks = finding.network and not recovering and self._network_checked != plan.generation
        if hung or finding.silent or looks:
            answered = [
                transaction.members.nodes[name] for name in sorted(question.answered & transaction.members.nodes.keys())
            ]
            self._stack_dumps.start(answered, question.stands, [stand.worker for stand in hung] or finding.silent)
        for stand in hung:
            self._end_worker(stand)
        if finding.silent:
            kind, nodes = FailureKind.LEASE_EXPIRED, transaction.members.nodes
            self._failures.handle(*(node_lost(name, kind, nodes[name].seen) for name in finding.silent))
        if looks:
            self._network_checked = plan.generation
            transaction.order_all(plan.workers, LookAround(generation=plan.generation))

    def _list_outside(self, plan: GenerationPlan) -> list[str]:
        """Return the connected members that have not entered their generation."""
        infos = (self._transaction.members.worker(worker) for worker in plan.workers)
        return [info.id for info in infos if info is not None and info.entered < plan.generation]

    def _is_silent(self, name: str) -> bool:
        """Return whether a node has sent nothing since the probe, for longer than its answers may take."""
        node, now = self._transaction.members.nodes[name], self._transaction.now
        since = self._silent_since.get(name, now)
        return node.seen <= since and now - since > self._answers.patience_s(name, now)

    def _select_to_end(self, hung: Iterable[ThreadActivity]) -> list[ThreadActivity]:
        """Return the hung workers that no agent was told to end recently."""
        now = self._transaction.now
        known = ((stand, self._ending.get(stand.worker)) for stand in hung)
        return [stand for stand, ending in known if ending is None or now - ending.at > END_AGAIN_S]

    def _end_worker(self, stand: ThreadActivity) -> None:
        """Order the agent to end a hung worker, if its node is connected.

        If its kill counts only after a verdict, all nodes are asked to report workers that need as long for the same
        work. If it exceeded no learned limit, the next such worker gets more time.
        """
        transaction, connection = self._transaction, self._transaction.members.connection_of(stand.worker)
        if connection is not None:
            if not (stand.limit_s or stand.stopped):  # This may be wrong: compiling takes one worker far longer.
                self._unknown_s *= REPEAT_FACTOR
            self._ending[stand.worker] = _Ending(stand, transaction.now)
            why = describe_hang(stand)
            on_trial = self._slow_work.record_kill(stand, why)
            transaction.send(connection, EndHung(worker=stand.worker, why=why, on_trial=on_trial))
            if on_trial:
                self._send_watch_work(stand)

    def _send_watch_work(self, stand: ThreadActivity) -> None:
        """Ask all nodes to report workers that need as long for the work at which a worker is ended."""
        watch = WatchWork(step=stand.step, activity=stand.activity, for_s=stand.for_s, micro_batch=stand.micro_batch)
        self._transaction.broadcast((node.connection for node in self._transaction.members.nodes.values()), watch)
