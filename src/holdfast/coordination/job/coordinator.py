"""The coordinator's state machine: every decision about a job, as (input, now) -> instructions.

First the handler of (input, job phase) runs; the tables are at the end of `Coordinator`. Then all due work runs, always
in the same order (`_advance`). Each call is one transaction: all durable changes go into one Persist before all events
and messages. So a crash leaves the state before the call or the state after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import ClassVar

import msgspec

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.failures.seen import node_lost
from holdfast.coordination.inputs import REQUESTS, Disconnected, Failure, FileFailed, Input, Received, Request, Tick
from holdfast.coordination.instructions import Emit, EndJob, Instruction
from holdfast.coordination.job.admission import Admission
from holdfast.coordination.job.deciding import Deciding
from holdfast.coordination.job.finishing import Finishing
from holdfast.coordination.job.handlers import Heard, Hearing
from holdfast.coordination.job.parts import JobParts, JobState
from holdfast.coordination.job.requests import grant
from holdfast.coordination.job.table import Row, always, row, while_it_goes_on
from holdfast.coordination.job.waiting import Waiting
from holdfast.coordination.membership import Membership, Node
from holdfast.coordination.nodes.pair_probes import PairProbe
from holdfast.coordination.nodes.probing import Newcomer, ProbeVerdict, Probing
from holdfast.coordination.progress.mending import missing_events
from holdfast.coordination.timing.lease import least_lease_s
from holdfast.coordination.turn import Transaction
from holdfast.errors import EXIT_BAD_INPUT
from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.position import Position
from holdfast.protocol.record import SCHEMA, KnownCheckpoint, Record

_ALIVE = msg.Heartbeat()
#: Fields of the record that a resumed job discards: its new workers report them again, or it does not need them.
_OF_ONE_RUN = (
    *("outcome", "plan", "pending", "decision", "passed", "raised", "given_up", "will", "stopped", "refusal"),
    *("script_digest", "config", "data", "global_batch", "micro_batches", "seed", "expert_shape"),
    *("saves", "saves_in_time"),
    *("layout", "layouts", "change", "layout_s", "too_large", "failed_layouts", "evaluated", "flop_per_sample"),
    *("leaving", "standbys", "slow", "relieved", "wanted", "places"),
)
_EMPTY = Record(schema=SCHEMA, job="", term=0)


class Coordinator:
    """Coordinates one job. The shell passes inputs with the time, and executes the returned instructions in order."""

    def __init__(
        self,
        config: CoordinatorConfig,
        tail: Position,
        record: Record | None,
        ended: tuple[int, int] | None = None,
    ) -> None:
        """Load the state of a job.

        Args:
            tail: the position after the last event in the journal.
            record: the stored record, or None if the store is empty.
            ended: for a job that is over and will be resumed: the highest term and generation in its journal.
        """
        self.config = config
        record = record or Record(schema=SCHEMA, job=config.spec.name, term=0)
        self._begins_again = ended is not None
        if ended is not None:
            term, generation = max(record.term, ended[0]), max(record.generation, ended[1])
            record = msgspec.structs.replace(record, term=term, generation=generation)
        #: Events that are in the record but not in the journal.
        self._lost = missing_events(record, tail)
        self.transaction = Transaction(record, reduce(Position.after, self._lost, tail))
        self.transaction.begins_again = self._begins_again
        self.parts = parts = JobParts(self.transaction, config)
        self.waiting = Waiting(parts)
        self._admission = Admission(parts)
        self._probing = Probing(self.transaction, parts.pair_probes)
        self._deciding = Deciding(parts)
        self._hearing = Hearing(parts)
        self._finishing = Finishing(parts)
        self._last_tick: float | None = None
        #: The last late tick: after it, learned lease times cannot be trusted for a while.
        self._late_tick = 0.0

    # ---- the shell's side ----

    @property
    def record(self) -> Record:
        """The durable state."""
        return self.transaction.record

    @property
    def members(self) -> Membership:
        """The connected nodes and their workers."""
        return self.transaction.members

    @property
    def over(self) -> EndJob | None:
        """How the job ended, or None if it has not ended."""
        return self.parts.ending.over

    @property
    def state(self) -> str:
        """The state for users: waiting, running, recovering, stopping, finished, stopped or failed."""
        if self.over is None and self.parts.closing.under_way:
            return "stopping"
        return self.record.outcome or self.parts.state

    def start(self, now: float, url: str, pid: int, checkpoints: Sequence[KnownCheckpoint] = ()) -> list[Instruction]:
        """Open a new term. Events that are in the record but not in the journal are emitted first.

        Args:
            checkpoints: intact checkpoints in the checkpoint directory, used if the record has none.
        """
        transaction, first = self.transaction, self.record.term == 0
        transaction.now = self._last_tick = now
        self.parts.progress.begin(now, first=first)
        since = self.record.run_since if self.config.takeover else 0.0
        identity = self.record.identity or self.config.identity
        born = self.record.born or now
        transaction.change(term=self.record.term + 1, run_since=since or now, born=born, identity=identity, url=url)
        if self._begins_again or (self.record.outcome == "failed" and not self.config.takeover):
            transaction.change(**{name: getattr(_EMPTY, name) for name in _OF_ONE_RUN})
        if self._begins_again and checkpoints:
            # Use only checkpoints that are in the directory: others may have been removed.
            transaction.change(checkpoints=())
        if not self.record.checkpoints and checkpoints and self.record.plan is None:
            # Continue after the highest term in the directory, so that new checkpoints are newer than all old ones.
            term = max(self.record.term, 1 + max(known.term for known in checkpoints))
            transaction.change(checkpoints=tuple(checkpoints), term=term)
        if not self.config.takeover:
            # The user may have corrected the data. The workers of this run report it again.
            transaction.change(data=())
        emulated, told = self.config.spec.experiments.emulated_seconds, self.parts.flop.event_fields
        transaction.origin = {"url": url, "coordinator_pid": pid, **told}
        if first:
            transaction.emit(ev.JobStarted, url=url, coordinator_pid=pid, **emulated, **told)
        else:
            transaction.emit(ev.CoordinatorRestarted, **transaction.origin)
        if self._begins_again and not self.record.checkpoints and transaction.position.step:
            self.parts.ledger.reset(0)
            transaction.emit(ev.RolledBack, to_step=0, why="the job begins again, and has no checkpoint")
        self.parts.record_age.begin()
        self.parts.tenant.start()
        self.parts.absences.expect(map(node_of, transaction.planned))
        self.parts.joining.wait_anew()
        self.parts.closing.taken_over(again=not self.config.takeover)
        self.parts.failing.on_start()
        if self.record.outcome:
            self.parts.ending.taken_over()
        return [*(Emit(event) for event in self._lost), *transaction.flush()]

    def handle(self, event: Input, now: float) -> list[Instruction]:
        """Handle one input and return the instructions for the shell.

        Raises:
            BadInputError, UnreachableError, RefusedError: a user's request is refused.
        """
        self.transaction.now = max(now, self.transaction.now)
        if isinstance(event, Received) and event.message == _ALIVE:
            # The most frequent message. It only renews the lease.
            self.members.renew(event.connection, self.transaction.now)
            return []
        self._take(event)
        # A heartbeat alone triggers no decision, unless a step has become complete.
        if self.parts.ledger.due or not (isinstance(event, Received) and isinstance(event.message, msg.Heartbeat)):
            self._advance()
            self.parts.tenant.update()
        if isinstance(event, Tick) and self.over is None:
            self.parts.newcomers.tell()
            self.parts.progress.tell(self.config.heartbeat_s)
            self.waiting.update()
        return self.transaction.flush()

    def _take(self, event: Input) -> None:
        if isinstance(event, Received):
            self._received(event)
        else:
            self._INPUTS[type(event)][self.parts.state](self, event)

    def _advance(self) -> None:
        """Do all work that is due."""
        self.parts.record_age.confirm()
        if why := self.parts.ladder.explain_deserted(awaited=bool(self.parts.absences.promised)):
            self.parts.ending.failed(why)
        if self.over is not None:
            return
        spare = self.members.complete_nodes - self.parts.replacing.needed
        for node, why in self.parts.start_probes.judge(spare):
            self.parts.misfit = why
            self._admission.refuse_node(node, why)
        self.parts.departures.let_go()
        self._deciding.decide()
        self.parts.departures.let_go()  # The decision may have released more draining nodes.
        self._deciding.start()
        plan = self.record.plan
        if plan is None or self.parts.stopping.stop is not None or self.over is not None:
            # While reports are awaited, the next membership is unknown.
            return
        self.parts.departures.look(plan, self.parts.checkpoints.newest_written)
        if at_boundary := self.parts.progress.release():
            self.parts.made_good()
        if self._fails_for_skipped_steps(plan):
            return
        self.parts.look_at_what_is_saved(plan)
        if self.parts.progress.finished(plan):
            if self.parts.closing.renews:
                self._deciding.renew()
            elif plan.last:
                self.parts.closing.end()
            else:
                self.parts.ending.done()
            return
        self.parts.joining.arm()
        if at_boundary and self._settled is not None:
            self.parts.change(plan)
        if self._settled is not None and not self.parts.departures.go_next(plan):
            self._rearrange(plan)

    def _fails_for_skipped_steps(self, plan: GenerationPlan) -> bool:
        """End the job if too many steps in a row were skipped; return whether nothing else follows from its steps."""
        why = self.parts.progress.skipped_too_often(self.config.spec.recovery.max_skipped_steps)
        if not why or plan.last:
            return False
        # Before all members have entered, a resumed job may have yet to roll back. Members that ended their loops need
        # not enter a generation that came into force with the last step.
        if not (self.members.entered(plan) or self.parts.progress.finished(plan)):
            return False
        self.parts.closing.fail(why)
        return True

    def _rearrange(self, plan: GenerationPlan) -> None:
        """Prepare improvements of a settled plan: standbys, additional nodes, a better expert placement."""
        self.parts.standbys.look(plan)
        self.parts.departures.enter_beside()
        self.parts.replacing.grow(plan)
        if not self.config.spec.recovery.restarts_all:
            self.parts.joining.prepare(plan)
        elif self.parts.joining.newcomers(plan):
            # Only a restart of all workers admits new nodes.
            self.parts.stopping.begin(self.transaction.now)
        if self._settled is not None and (experts := self.parts.other_placement(plan)) is not None:
            self.parts.joining.rearrange(plan, experts)

    @property
    def _settled(self) -> GenerationPlan | None:
        """The plan in force if nothing is about to change it, or None."""
        plan = self.record.plan
        if plan is None or plan.last or plan.puts_away or self.members.owed:
            return None
        calm = self.parts.state is JobState.RUNNING and self.record.pending is None and not self.parts.absences.promised
        return plan if calm and self.members.entered(plan) else None

    # ---- connections ----

    def _received(self, event: Received) -> None:
        node = self.members.on(event.connection)
        message = event.message
        if isinstance(message, msg.Hello):
            if node is None:
                self._hello(event.connection, message)
        elif node is not None:
            node.seen = self.transaction.now
            if not (node.standby and self.parts.standbys.take(node, message)):
                self._AGENT_SAYS[type(message)][self.parts.state](self, node, message)
        elif isinstance(message, msg.AddressProbed):
            self._on_address_probed(event.connection, message)
        else:
            # The node was expelled, or is not admitted yet.
            self._probing.keep(event.connection, message)

    def _hello(self, connection: int, hello: msg.Hello) -> None:
        known = self.members.nodes.get(hello.node)
        if known is not None and known.session == hello.session:
            # The agent reconnected before the end of its old connection was noticed.
            self.transaction.close(known.connection)
            self._take(Disconnected(known.connection))
        if self._admission.bad_address(hello) is None and self._probing.begin(connection, hello):
            return
        node = self._admission.let_in(connection, hello)
        if node is None:
            return
        self.parts.start_probes.begin(node)
        if not node.returning and not node.aside:
            self.parts.newcomers.came(node)
        generation = self.transaction.generation
        ended = {kept.worker: kept for kept in hello.kept if isinstance(kept, msg.WorkerDown)}
        # The other members have continued without these workers.
        superseded = {
            worker for worker, down in ended.items() if down.has_left_loop and worker not in self.transaction.planned
        }
        for kept in hello.kept:
            if isinstance(kept, msg.AppliedSteps | msg.WorkerDown):
                if not self.parts.standbys.take(node, kept):
                    self._AGENT_SAYS[type(kept)][self.parts.state](self, node, kept)
            elif kept.worker not in superseded:
                self._hearing.take(node, kept)
            if self.members.on(connection) is not node:
                # The node was expelled because of a message in its Hello.
                return
        # The node's whole report is processed. Until here it counted as disconnected.
        self.parts.absences.on_node_returned(node)
        if self.over is None:
            self._admission.catch_up(node, generation, ended.keys() | self.members.left.keys())
        else:
            self.parts.ending.late(node)

    def _on_address_probed(self, connection: int, answer: msg.AddressProbed) -> None:
        probe = self.parts.pair_probes.on_probed(connection, answer)
        if probe is not None:
            self._on_probe_ended(probe)

    def _on_probe_ended(self, probe: PairProbe) -> None:
        self.parts.start_probes.on_probed(probe)
        self._conclude(self._probing.on_probed(probe))

    def _conclude(self, probed: tuple[Newcomer, ProbeVerdict] | None) -> None:
        """Admit or refuse a newcomer after its probe."""
        if probed is None:
            return
        newcomer, outcome = probed
        if outcome is ProbeVerdict.REFUSED and self.over is None:
            self._admission.refuse_newcomer(newcomer.connection, newcomer.hello, newcomer.why)
            return
        self._hello(newcomer.connection, newcomer.hello)
        for message in newcomer.backlog:
            self._take(Received(newcomer.connection, message))

    def _disconnected(self, event: Disconnected) -> None:
        self._probing.forget(event.connection)
        if (node := self.members.on(event.connection)) is not None:
            self.parts.failures.take(node_lost(node.name, FailureKind.CONNECTION_LOST, self.transaction.now))

    def _disconnected_at_last(self, event: Disconnected) -> None:
        self._probing.forget(event.connection)
        if (node := self.members.on(event.connection)) is not None:
            self.parts.departures.depart(node, self.parts.ending.farewell)

    def _leave(self, node: Node, leave: msg.Leave) -> None:
        self.parts.failures.gone(self.parts.departures.depart(node, leave.reason, leave.detail), self.transaction.now)
        self.parts.ladder.on_leave(node, leave)

    def _leave_at_last(self, node: Node, leave: msg.Leave) -> None:
        self.parts.departures.depart(node, leave.reason)
        if leave.awaits_answer:
            self.parts.ending.late(node)

    # ---- time ----

    def _paused(self) -> bool:
        """Return whether this process was paused, so that leases prove nothing about nodes."""
        last, self._last_tick = self._last_tick, self.transaction.now
        away_s = 0.0 if last is None else self.transaction.now - last
        if away_s > least_lease_s(self.config.lease_s, self.config.heartbeat_s) / 2:
            self._late_tick = self.transaction.now
        if away_s <= self.config.lease_s / 2:
            return False
        # Another coordinator may lead by now. A write detects that: agents that are connected here then look for it.
        self.transaction.change()
        self.members.renew_leases(self.transaction.now)
        self.parts.absences.pause_over()
        self._admission.pause_over()
        self.parts.pair_probes.pause_over()
        self.parts.inquiry.restart_waiting()
        return True

    def _tick_at_last(self, _tick: Tick) -> None:
        self._paused()
        for probed in self._probing.end():
            self._conclude(probed)

    def _tick(self, _tick: Tick) -> None:
        if self._paused():
            return
        config, now = self.config, self.transaction.now
        in_time = now - self._late_tick > config.lease_s
        least_s = least_lease_s(config.lease_s, config.beat_s(len(self.members.nodes)) if in_time else config.lease_s)
        expired = [(node.name, node.seen) for node in self.members.expired(now, config.lease_s, least_s)]
        ends = self.parts.closing.under_way
        away = self.parts.absences.overdue(
            config.lease_s, self.parts.layouts.needed_nodes, config.return_timeout_s, ends=ends
        )
        self.parts.failures.take(*(node_lost(name, FailureKind.LEASE_EXPIRED, at) for name, at in [*expired, *away]))
        if self.parts.joining.overdue:
            self.parts.failures.undo_pending(now, ())
        self.parts.inquiry.tick()
        self._finishing.tick()
        for probed in self._probing.tick():
            self._conclude(probed)
        for probe in self.parts.pair_probes.tick():
            self._on_probe_ended(probe)
        self.parts.start_probes.tick()
        self.parts.standbys.tick()
        self.parts.failing.tick()
        self.parts.closing.tick()

    def _hear(self, node: Node, message: Heard) -> None:
        self._hearing.hear(node, message)

    def _probed(self, node: Node, answer: msg.AddressProbed) -> None:
        self._on_address_probed(node.connection, answer)

    def _asks(self, node: Node, ask: msg.AskPlan) -> None:
        if why := self.parts.telling.asked(node, ask):
            self._hearing.expel(node, why)

    def _worker_down(self, node: Node, down: msg.WorkerDown) -> None:
        if not self._hearing.is_news(node, down) or self.parts.failing.on_worker_down(down):
            return
        known, member = self.members.drop(node, down.worker), self.transaction.is_member(down.worker)
        # All members have the same script and settings, so bad input of one member is bad input of all.
        if down.exit_code == EXIT_BAD_INPUT and (not self.transaction.generation or (member and not down.final)):
            self.parts.ending.failed(down.detail, EXIT_BAD_INPUT)
            return
        if down.has_left_loop:
            self._finishing.left(down, known)
            return
        if self.parts.raisers.no_more(down) and self._hearing.useless(node, down.detail):
            return
        if self.over is None:
            self._hearing.ended(node, down, was_here=known is not None)
        self.parts.raisers.ended(down)

    def _worker_down_at_last(self, node: Node, down: msg.WorkerDown) -> None:
        self.members.drop(node, down.worker)
        self.parts.ending.late(node)

    # ---- requests of users and of the shell ----

    def _failed(self, failure: Failure) -> None:
        if not self.parts.ending.takes(failure.node) and failure.node in self.members.nodes:
            self.parts.failures.take(failure)

    def _file_failed(self, failed: FileFailed) -> None:
        self.transaction.emit(ev.OutputLost, file=failed.file, why=failed.why)

    def _asked(self, request: Request) -> None:
        grant(self.parts, request)

    #: Handlers of the shell's inputs, by job phase.
    _INPUTS: ClassVar[dict[type, Row]] = {
        Disconnected: row(_disconnected, _disconnected, _disconnected, _disconnected_at_last),
        Tick: row(_tick, _tick, _tick, _tick_at_last),
        Failure: always(_failed),
        FileFailed: while_it_goes_on(_file_failed),
        **dict.fromkeys(REQUESTS, always(_asked)),
    }

    #: Handlers of agents' messages, by job phase.
    _AGENT_SAYS: ClassVar[dict[type, Row]] = {
        msg.Heartbeat: while_it_goes_on(_hear),
        msg.FromWorker: always(_hear),
        msg.AskPlan: while_it_goes_on(_asks),
        msg.AddressProbed: always(_probed),
        msg.Posts: while_it_goes_on(_hear),
        **dict.fromkeys((msg.AppliedSteps, msg.NodeSnapshots, msg.EndNotice, msg.MemoryTaken), while_it_goes_on(_hear)),
        **dict.fromkeys((msg.OutputFailed, msg.ClockOffset, msg.GpusRead), while_it_goes_on(_hear)),
        **dict.fromkeys((msg.Late, msg.ProbeAnswer, msg.Stacks, msg.OwnTimes), while_it_goes_on(_hear)),
        msg.WorkerDown: row(_worker_down, _worker_down, _worker_down, _worker_down_at_last),
        msg.Leave: row(_leave, _leave, _leave, _leave_at_last),
    }
