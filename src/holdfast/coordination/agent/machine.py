"""The state machine of a node's agent: it starts and replaces workers, relays messages, and replays kept ones.

The shell (control, or the simulation) calls a method for each event and executes the returned instructions, in order.
The shell holds the connection and the processes; all decisions are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

import msgspec

from holdfast.coordination.agent.held_snapshots import HeldSnapshots
from holdfast.coordination.agent.identity import NodeIdentity, is_from_newest
from holdfast.coordination.agent.instructions import (
    AdmitReaders,
    AgentInstruction,
    AnswerRequest,
    EndAgent,
    KillHung,
    Reconnect,
    Replay,
    SendToCoordinator,
    SendToWorkers,
    SnapshotWork,
    StartWorker,
    UpdateCheckpoints,
)
from holdfast.coordination.agent.known_plans import KnownPlans, PlanBuilder
from holdfast.coordination.agent.node_steps import NodeSteps
from holdfast.coordination.agent.place import LocalRank, WrittenParts, first_replayed, last_replayed
from holdfast.coordination.agent.posted_keys import PostedKeys
from holdfast.coordination.agent.replay import split_to_fit, wrap_messages
from holdfast.coordination.agent.replica_groups.forming import ReplicaGroups
from holdfast.coordination.agent.restarts import Restarts
from holdfast.coordination.collection.rendezvous import PostedTooMuchError
from holdfast.coordination.hang_detection.watchdog import LateWatch
from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.layouts.group_messages import UnitWord
from holdfast.protocol.messages.agent import (
    AddressProbed,
    AgentMessage,
    ClockOffset,
    Committed,
    CoordinatorMessage,
    EndNode,
    FromWorker,
    GpusRead,
    HeardGeneration,
    Heartbeat,
    Kept,
    Leave,
    NodeOrder,
    NodeSnapshots,
    OutputFailed,
    ProbeAddress,
    Refused,
    Replace,
    Seen,
    SnapshotOrder,
    ToWorker,
    Welcome,
    WorkerDown,
)
from holdfast.protocol.messages.orders import CheckpointOrder
from holdfast.protocol.messages.plans import BeginNode, PrepareNode
from holdfast.protocol.messages.progress import CountHang, EndHung, Probe, TakeMemory, TakeStacks, WatchWork
from holdfast.protocol.messages.worker import (
    Applied,
    Attach,
    CheckpointNews,
    Entered,
    Post,
    ReceivedSteps,
    Report,
    SnapshotTaken,
    WorkerMessage,
)
from holdfast.protocol.names import index_of, worker_id
from holdfast.protocol.state import SnapshotPart

#: exit code of a node if the job is done but its script failed afterwards
TAIL_FAILED = 3
#: defaults, until a coordinator sends its own values
LEASE_S, WATCH_S = 3.0, 0.1


class AgentMachine:
    """One node's agent, from its start to its end.

    Args:
        nonce: Returns a unique name (8 to 32 hexadecimal digits) at each call.
        maker: Builds plans from changes; the default is a new one.
    """

    def __init__(self, node: NodeIdentity, nonce: Callable[[], str], maker: PlanBuilder | None = None) -> None:
        self.node = node
        #: the highest term of a coordinator seen
        self.term = 0
        self.session = nonce()
        self.over: EndAgent | None = None
        self.ever_welcomed = False
        #: the newest generation that was announced to this node's workers
        self.heard = HeardGeneration()
        self._nonce = nonce
        self._places = [LocalRank() for _ in range(node.workers)]
        self._steps = NodeSteps(self._places)
        self._plans = KnownPlans(maker)
        self._written = WrittenParts()
        self._keys = PostedKeys()
        self._snapshots = HeldSnapshots()
        #: finds workers that make no progress; the shell polls it every `watch.check_interval_s` seconds
        self.watch = LateWatch()
        self.units = ReplicaGroups(node.workers, nonce)
        self._connected = False
        self._sent_at = 0.0
        self._tail_code = EXIT_DONE
        self._welcome: Welcome | None = None
        self._unfit: Leave | None = None
        self._restarts = Restarts()
        #: the times of the last Hello: by the agent's clock, and by its wall clock (0 if unknown)
        self._hello_at = 0.0, 0.0
        #: the last reading of the GPUs, or None before the first
        self._gpus: GpusRead | None = None
        #: the workers that are being killed only to find out whether they are the cause of a hang
        self._on_trial = set[str]()

    @property
    def workers(self) -> tuple[str, ...]:
        """The present workers by index; "" if the worker has ended and is not replaced."""
        return tuple("" if place.ended else place.worker for place in self._places)

    @property
    def committed(self) -> int:
        """The newest step known to be in the coordinator's journal."""
        return self._steps.committed

    @property
    def is_welcomed(self) -> bool:
        """Whether a coordinator has accepted the connection."""
        return self._welcome is not None

    @property
    def watch_s(self) -> float:
        """The longest time between two calls of `tick`, in seconds."""
        return self._welcome.heartbeat_s if self._welcome else WATCH_S

    # ---- start and end ----

    def start(self, snapshots: NodeSnapshots | None = None) -> list[AgentInstruction]:
        """Start workers for all local ranks. `snapshots` are the parts found in memory; None: this node keeps none."""
        self._snapshots.reset(snapshots)
        return [self._fill(place, index) for index, place in enumerate(self._places)]

    def tick(self, now: float, stopped: Collection[str]) -> list[AgentInstruction]:
        """Send a heartbeat if one is due or workers have applied steps that were not reported, end workers whose
        process was stopped for longer than the lease, and end workers that are late for their replica group.

        Args:
            stopped: The workers with a stopped process (SIGSTOP).
        """
        if self.over is not None:
            return []
        out: list[AgentInstruction] = []
        welcome = self._welcome
        if welcome is not None:
            standing = self._steps.make_heartbeat()
            if standing is not None or now - self._sent_at > welcome.heartbeat_s / 2:
                out += self._send(standing or Heartbeat(), now)
        lease_s = welcome.lease_s if welcome else LEASE_S
        for place in self._places:
            if place.update_stopped_time(now, stopped=place.worker in stopped) > lease_s:
                out.append(KillHung(place.worker, "the process was stopped for longer than the lease"))
        return out + self.units.end_late_workers(now, self.workers)

    def send_seen(self, *messages: Seen | OutputFailed | AddressProbed, now: float) -> list[AgentInstruction]:
        """Report observations of the workers to the coordinator."""
        return [order for message in messages for order in self._send(message, now)]

    def on_gpus_read(self, gpus: GpusRead, now: float) -> list[AgentInstruction]:
        """Report the GPUs, now and on each later connection."""
        self._gpus = gpus
        return self._send(gpus, now)

    def end(self, exit_code: int, why: str) -> list[AgentInstruction]:
        """End the agent, as requested on this node."""
        return self._end(EndAgent(exit_code, why))

    # ---- the connection ----

    def on_connected(self, now: float, *, wall: float = 0.0, unfit: str = "") -> list[AgentInstruction]:
        """Send Hello over a new connection, with all that a coordinator must know of the workers.

        Kept messages for which it has no room follow in a `Replay`. Empty if the agent has ended.

        Args:
            wall: The time of the node's wall clock, or 0 if unknown.
            unfit: Why the node should not train, or "".
        """
        if self.over is not None:
            return []
        self._connected, self._welcome = True, None
        replay = self._replay()
        kept, rest = split_to_fit(replay)
        self._hello_at = now, wall
        held_parts = self._snapshots.held_parts
        hello = self.node.make_hello(self.session, self.term, kept, now, unfit, held_parts, self.heard)
        out = self._send(hello, now)
        if rest is not None:
            out.append(Replay(wrap_messages(chain((rest,), replay))))
        return out

    def on_disconnected(self) -> None:
        """Record that the connection has ended, from either side."""
        self._connected, self._welcome = False, None
        self.units.on_disconnected()

    def on_message(self, message: CoordinatorMessage, now: float) -> list[AgentInstruction]:
        """Handle a message of the coordinator: an order for workers, storage or this node, the answer to Hello,
        committed steps, or a request for the shell to answer (`AnswerRequest`).

        Ignored without a connection or after the end. EndNode because the job is done is also ignored if all local
        ranks were told so: the node then ends after its scripts. The shell itself handles injected faults (NodeFault).
        """
        if self.over is not None or not self._connected:
            return []
        if isinstance(message, SnapshotOrder | CheckpointOrder):
            return self._on_storage_order(message)
        if isinstance(message, NodeOrder):
            return self._on_node_order(message, now)
        match message:
            case ToWorker():
                return self._on_worker_order(message)
            case EndHung() | Replace() | CountHang() | WatchWork():
                return self._on_hang_order(message, now)
            case Committed():
                if message.term >= self.term:
                    self._steps.forget_up_to(message.step)
            case Welcome():
                return self._on_welcome(message, now)
            case Refused():
                return self._on_refused(message)
            case EndNode():
                if message.exit_code == EXIT_DONE and all(place.done for place in self._places):
                    # The scripts end on their own, and the node ends after them.
                    return []
                return self._end(EndAgent(message.exit_code, message.why, message.alone))
            case _:
                return (
                    [AnswerRequest(message)]
                    if isinstance(message, Probe | TakeStacks | TakeMemory | ProbeAddress)
                    else []
                )
        return []

    def _on_welcome(self, welcome: Welcome, now: float) -> list[AgentInstruction]:
        """Adopt the coordinator's term, limits, members and committed step.

        Then report the clock and the GPUs, let the workers' replica groups use the current layout, and leave if this
        node is unfit. A coordinator of an older term is refused: the agent connects again.
        """
        if welcome.term < self.term:
            return self._reconnect(f"refused a coordinator of term {welcome.term}: term {self.term} is known")
        self.term = welcome.term
        if welcome.identity != self.heard.identity:
            self.heard = HeardGeneration(identity=welcome.identity)
        self._steps.forget_up_to(welcome.committed)
        self._welcome, self.ever_welcomed = welcome, True
        self._restarts.set_limits(welcome.max_restarts, welcome.rules)
        self._plans.reset_members(welcome.members)
        return [
            *self._report_clock(welcome, now),
            *(self._send(self._gpus, now) if self._gpus is not None else ()),
            *self._admit_readers(),
            *self.units.on_welcome(welcome, now),
            *self._leave_unfit(now),
        ]

    def _report_clock(self, welcome: Welcome, now: float) -> list[AgentInstruction]:
        """Report how far the wall clock is ahead of the coordinator's, with half a round trip as the uncertainty.

        Empty if one of the two times is unknown.
        """
        hello_clock, wall = self._hello_at
        if not (wall and welcome.time):
            return []
        half_s = max(0.0, now - hello_clock) / 2
        return self._send(ClockOffset(ahead_s=wall + half_s - welcome.time, uncertainty_s=half_s), now)

    def _on_refused(self, refused: Refused) -> list[AgentInstruction]:
        """End the agent, or if `refused.retry`, start a new session: replace all workers, forget their messages and
        steps, and connect again.

        An unfit node only kills its workers and connects again to report why it leaves.
        """
        if not refused.retry:
            return self._end(EndAgent(refused.exit_code, refused.why))
        # No message of the old workers may count.
        self.session = self._nonce()
        self.heard = HeardGeneration()
        self._written, self._steps = WrittenParts(), NodeSteps(self._places, self.committed)
        if self._unfit is None:
            fresh = [self._fill(place, index) for index, place in enumerate(self._places)]
        else:  # The node reconnects only to report why it must leave.
            fresh = [KillHung(place.worker, self._unfit.detail) for place in self._places if not place.ended]
        for place in self._places:
            place.forget()
        # A node that must only start new workers is not to blame. The exit code is then that of success.
        blame = refused.exit_code != EXIT_DONE
        return [*fresh, *self._reconnect(f"expelled: {refused.why}; coming back with new workers", blame=blame)]

    def _reconnect(self, why: str, *, blame: bool = True) -> list[AgentInstruction]:
        self.on_disconnected()
        return [Reconnect(why, blame)]

    # ---- orders to the workers ----

    def _on_worker_order(self, message: ToWorker) -> list[AgentInstruction]:
        """Pass an order on to one worker, and update its kept messages.

        Ignore an order from an older term, before Welcome, or for a worker that no longer exists.
        """
        place, order = self._place_of(message.worker), message.order
        if self._welcome is None or place is None or not is_from_newest(order, self.term):
            return []
        place.on_order_sent(order)
        return [SendToWorkers((place.worker,), order)]

    def _on_node_order(self, order: NodeOrder, now: float) -> list[AgentInstruction]:
        """Pass an order on to the workers to which it applies, or request a plan that is missing here.

        Remember the newest announced generation. Orders of older terms, or before Welcome, are ignored.
        """
        if self._welcome is None or not is_from_newest(order, self.term):
            return []
        if isinstance(order, BeginNode | PrepareNode) and order.plan.rest.generation > self.heard.generation:
            plan, identity = order.plan.rest, self.heard.identity
            self.heard = HeardGeneration(identity=identity, term=plan.term, generation=plan.generation)
        here = {place.worker: place for place in self._places if Attach in place.latest and not place.ended}
        out: list[AgentInstruction] = []
        for order_for_worker in self._plans.on_order(order, tuple(here)):
            if isinstance(order_for_worker, SendToWorkers):
                for worker in order_for_worker.workers:
                    here[worker].on_order_sent(order_for_worker.order)
                out.append(order_for_worker)
            else:
                out += self._send(order_for_worker, now)
        return out

    # ---- events of the workers ----

    def on_worker_message(self, message: WorkerMessage | UnitWord, now: float) -> list[AgentInstruction]:
        """Keep a worker's message for the replay, and pass it on to the coordinator.

        Exceptions: an applied step is sent only if `NodeSteps.on_applied` returns it, posted keys are bundled, messages
        within a replica group stay on the node, and before a report, all unsent steps are sent. Messages of former
        workers are ignored, except about checkpoints.
        """
        place = self._place_of(message.worker)
        if isinstance(message, CheckpointNews) and self.over is None:
            self._written.keep(message)  # The worker may have ended by now.
            return self._send(FromWorker(message=message), now)
        if place is None or self.over is not None:
            return []
        if isinstance(message, UnitWord):
            return [*self._snapshots.open_if_needed(message), *self.units.on_group_message(message, now)]
        out: list[AgentInstruction] = []
        match message:
            case Attach():
                out = self.units.on_attach(message.worker)
            case ReceivedSteps():
                self._steps.on_known_steps(message)
                return []
            case Applied():
                place.keep(message)
                unsent = self._steps.on_applied(place, message, now)
                return self._send(FromWorker(message=unsent), now) if unsent is not None else []
            case Post():
                try:
                    bundles = self._keys.add(message, self._plans.members_of(message.generation))
                except PostedTooMuchError as error:
                    return [KillHung(place.worker, str(error))]
                return [instruction for bundle in bundles for instruction in self._send(bundle, now)]
            case Entered():
                self._steps.enter_generation(message.applied, message.generation)
            case Report():
                out = self._send_unsent_steps(now)
            case SnapshotTaken():
                taken = self._snapshots.add_own(message.snapshot)
                return [*self._send(FromWorker(message=message), now), *self._send_held_parts(taken, now)]
            case _:
                pass
        place.keep(message)
        return [*out, *self._send(FromWorker(message=message), now)]

    def _send_unsent_steps(self, now: float) -> list[AgentInstruction]:
        """Report the steps that only this node may know: their witnesses may be dead."""
        pages = self._steps.pop_unsent() if self._connected else ()
        return [instruction for page in pages for instruction in self._send(page, now)]

    def on_worker_ended(self, down: WorkerDown, now: float, *, clean: bool) -> list[AgentInstruction]:
        """Handle the end of a worker's process. Ignored for a worker that was replaced before, or after the agent's
        end.

        If the job is done, the local rank has finished. If the script left its loop without error, the worker stays a
        member and its end is reported. Else report and replace it, together with the other workers of its replica
        group.

        Args:
            down: How it ended, in case that was a failure.
            clean: Whether its exit code is 0 or unknown.
        """
        place = self._place_of(down.worker)
        if place is None or self.over is not None:
            return []
        if place.done:
            return self._on_finished_worker(place, now, clean=clean)
        mates = self.units.group_mates(place.worker)
        if down.has_left_loop and not place.warming:
            # It stays a member with the state that it has applied, so no other worker must repeat anything.
            if not mates:
                self.units.dissolve_group(index_of(place.worker))
            place.ended = True
            place.down = msgspec.structs.replace(down, applied=place.applied)
            return [*self._send_unsent_steps(now), *self._send(place.down, now)]
        free = down.worker in self._on_trial and down.kind is FailureKind.HANG
        self._on_trial.discard(down.worker)
        return [*self._replace_lost(place, down, now, free=free), *self._end_group_mates(mates, down.worker, now)]

    def _replace_lost(
        self, place: LocalRank, down: WorkerDown, now: float, *, free: bool = False, last: bool = False
    ) -> list[AgentInstruction]:
        """Report a lost worker to the coordinator, and start another process for its local rank, unless `_replace`
        decides otherwise.

        If it was warming up, report that as failed, too; the restart then does not count.

        Args:
            free: Whether the restart does not count against the limit.
            last: Whether the local rank stays empty.
        """
        cold: list[AgentInstruction] = []
        if warming := place.warming:
            warmed, down = place.warm_up_failure(down)
            cold = self._send(FromWorker(message=warmed), now)
        return [*cold, *self._send(down, now), *self._replace(place, down, now, free=free or warming, last=last)]

    def _end_group_mates(self, mates: Iterable[int], cause: str, now: float) -> list[AgentInstruction]:
        """End and replace the other workers of the replica group of `cause`, the worker that ended: a group is complete
        or absent.

        If `cause` was not replaced, they are killed and not replaced either.
        """
        out: list[AgentInstruction] = []
        replaced = bool(self.workers[index_of(cause)])
        for place in (self._places[index] for index in mates):
            if place.done or not place.worker:
                continue
            worker = place.worker
            down = place.down_with_group(cause)
            if not (replaced or place.ended):
                out.append(KillHung(worker, down.detail))
            out += self._replace_lost(place, down, now, free=True, last=not replaced)
        return out

    def _replace(
        self, place: LocalRank, down: WorkerDown, now: float, *, free: bool = False, last: bool = False
    ) -> list[AgentInstruction]:
        """Dissolve the replica group of a local rank and start another process for it.

        No process is started if `last`, if the failure would repeat, or if this node is unfit; if the machine is broken
        or was restarted too often, the node leaves. Steps that only the lost worker has applied are dropped.

        Args:
            free: Whether the restart does not count against the limit.
            last: Whether the local rank stays empty.
        """
        index = index_of(place.worker)
        self.units.dissolve_group(index)
        place.refill("")
        # Only its end is replayed. Its earlier messages would look as if the worker had come back. A step that
        # it alone has applied may be repeated with another result.
        place.down = down
        place.down_reported = self._connected
        self._steps.undo_after(max(other.applied for other in self._places))
        if last or down.final or down.exit_code == EXIT_BAD_INPUT or self._unfit is not None:
            place.ended = (
                True  # Another process would fail in the same way. The coordinator decides how the job goes on.
            )
        elif why := self._restarts.refuse_restart(down, now, free=free):
            place.ended = True
            reason = "quarantined" if self._restarts.is_machine_broken(down) else "exhausted"
            self._unfit = Leave(reason=reason, detail=f"node {self.node.node}: {why}"[:8000])
            return self._leave_unfit(now)
        else:
            return [self._fill(place, index)]
        return []

    def _on_hang_order(self, message: EndHung | Replace | CountHang | WatchWork, now: float) -> list[AgentInstruction]:
        """Kill a worker that hangs, replace one whose script raised, count a kill against this node, or set the
        watchdog's deadline for work.
        """
        match message:
            case EndHung():
                return self._end_hung(message)
            case Replace():
                return self._replace_raised(message, now)
            case CountHang():
                return self._count_hang(message, now)
            case WatchWork():
                self.watch.expect_end(message)
                return []

    def _end_hung(self, message: EndHung) -> list[AgentInstruction]:
        """Kill a worker that hangs.

        If the kill is only a trial to find the cause, the restart will not count. Ignore workers that no longer exist.
        """
        if self._place_of(message.worker) is None:
            return []
        if message.on_trial:
            self._on_trial.add(message.worker)
        return [KillHung(message.worker, message.why)]

    def _replace_raised(self, message: Replace, now: float) -> list[AgentInstruction]:
        """Replace a worker whose script has raised, and its replica group; its own end is not reported again.

        Ignore workers that have not raised.
        """
        place = self._place_of(message.worker)
        raised = place.script_error if place is not None else None
        if place is None or raised is None:
            return []
        mates = self.units.group_mates(message.worker)
        return [*self._replace(place, raised, now), *self._end_group_mates(mates, message.worker, now)]

    def _count_hang(self, message: CountHang, now: float) -> list[AgentInstruction]:
        """Count a kill against this node's limit of restarts, and leave the job if there were too many."""
        why = self._restarts.count_failure(message.worker, message.why, now)
        if not why or self._unfit is not None:
            return []
        self._unfit = Leave(reason="exhausted", detail=f"node {self.node.node}: {why}"[:8000])
        return self._leave_unfit(now)

    def _on_finished_worker(self, place: LocalRank, now: float, *, clean: bool) -> list[AgentInstruction]:
        """Record that a worker of a finished job has ended.

        If it was the last of the node, say goodbye and end the agent, with exit code `TAIL_FAILED` if a script failed
        after the job was done.
        """
        place.refill("")
        place.ended = place.done = True
        if not clean:
            self._tail_code = TAIL_FAILED  # the job is done, but the script failed after it
        if not all(place.ended for place in self._places):
            return []
        return [*self._send(Leave(reason="finished"), now), *self._end(EndAgent(self._tail_code))]

    def _leave_unfit(self, now: float) -> list[AgentInstruction]:
        """Report why the node must leave, now or on the next connection. The coordinator then ends it."""
        return self._send(self._unfit, now) if self._unfit is not None and self._welcome is not None else []

    def _on_storage_order(self, message: SnapshotOrder | CheckpointOrder) -> list[AgentInstruction]:
        """Return the instructions for an order about checkpoints (for the agent and the attached workers) or about
        snapshots.

        Orders of older terms are ignored.
        """
        if isinstance(message, CheckpointOrder):  # The order is also for the workers, which know about written parts.
            here = tuple(place.worker for place in self._places if Attach in place.latest and not place.ended)
            return (
                [UpdateCheckpoints(message), SendToWorkers(here, message)]
                if self.is_welcomed and is_from_newest(message, self.term)
                else []
            )
        return [self._snapshots.on_order(message)] if message.term >= self.term else []

    def on_memory_opened(self, snapshots: NodeSnapshots | None, now: float) -> list[AgentInstruction]:
        """Record that memory for snapshot parts is open, with the parts found there, or None if that failed."""
        self._snapshots.reset(snapshots)
        return [*self._admit_readers(), *self._send_held_parts([], now)]

    def _admit_readers(self) -> list[AgentInstruction]:
        return [AdmitReaders(self._welcome.snapshot_key)] if self._welcome and self._snapshots.held_parts else []

    def on_part_fetched(self, part: SnapshotPart, now: float) -> list[AgentInstruction]:
        """Record that a copy of another node's snapshot part has arrived."""
        return self._send_held_parts(self._snapshots.add_copy(part), now)

    def _send_held_parts(self, work: list[SnapshotWork], now: float) -> list[AgentInstruction]:
        """Report the held parts before deleting, so that no peer requests a deleted part."""
        return [*(self._send(held_parts, now) if (held_parts := self._snapshots.held_parts) is not None else ()), *work]

    # ---- replay ----

    def _replay(self) -> Iterator[Kept]:
        """Yield the messages that tell a coordinator about the workers as of now: ends first, positions last."""
        life, stand = first_replayed(self._places), last_replayed(self._places)
        return chain(life, self._steps.replay(), self._written.kept, stand)

    # ---- helpers ----

    def _fill(self, place: LocalRank, index: int) -> StartWorker:
        """Assign a new worker to a local rank, dissolve its former replica group, and return the instruction to start
        its process.
        """
        self.units.dissolve_group(index)
        place.refill(worker_id(self.node.node, index, self._nonce()))
        return StartWorker(place.worker)

    def _place_of(self, worker: str) -> LocalRank | None:
        return next((place for place in self._places if place.worker == worker and not place.ended), None)

    def _send(self, message: AgentMessage, now: float) -> list[AgentInstruction]:
        self._sent_at = now if self._connected else self._sent_at
        return [SendToCoordinator(message)] if self._connected else []

    def _end(self, end: EndAgent) -> list[AgentInstruction]:
        """Record the end of the agent and return it as the instruction. Empty if it has ended before."""
        if self.over is not None:
            return []
        self.over = end
        return [end]
