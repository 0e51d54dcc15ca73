"""A node's agent as a machine: what it keeps and says again, whom it obeys, which workers it replaces, when it ends.

The shell (control, or the simulation) calls a method for whatever happens and carries out what comes back, in order.
It holds the connection and the processes; all that is decided is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

import msgspec

from holdfast.coordination.agent.held_snapshots import HeldSnapshots
from holdfast.coordination.agent.identity import NodeIdentity, comes_from
from holdfast.coordination.agent.instructions import (
    AdmitReaders,
    AgentInstruction,
    Answer,
    EndAgent,
    KillHung,
    Pass,
    Reconnect,
    Replay,
    Say,
    SnapshotWork,
    StartWorker,
    Stow,
)
from holdfast.coordination.agent.known_plans import KnownPlans, PlanMaker
from holdfast.coordination.agent.node_steps import NodeSteps
from holdfast.coordination.agent.place import WorkerPlace, WrittenParts, kept_of_life, kept_of_stand
from holdfast.coordination.agent.posted_keys import PostedKeys
from holdfast.coordination.agent.replay import envelopes, fitting
from holdfast.coordination.agent.replica_groups.forming import Units
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
    KnownSteps,
    Post,
    Report,
    SnapshotTaken,
    WorkerMessage,
)
from holdfast.protocol.names import index_of, worker_id
from holdfast.protocol.state import SnapshotPart

#: how a node ends where the job is done but a script failed after it
TAIL_FAILED = 3
#: until a coordinator has said its own
LEASE_S, WATCH_S = 3.0, 0.1


class AgentMachine:
    """One node's agent, from its start to its end.

    Args:
        nonce: gives a name (8 to 32 hexadecimal digits) that nobody else has, at each call another one.
        maker: makes plans of what is told of them; by default one of its own.
    """

    def __init__(self, node: NodeIdentity, nonce: Callable[[], str], maker: PlanMaker | None = None) -> None:
        self.node = node
        #: the highest term of a coordinator seen
        self.term = 0
        self.session = nonce()
        self.over: EndAgent | None = None
        self.ever_welcomed = False
        #: the newest generation that was announced to this node's workers
        self.heard = HeardGeneration()
        self._nonce = nonce
        self._places = [WorkerPlace() for _ in range(node.workers)]
        self._steps = NodeSteps(self._places)
        self._plans, self._written = KnownPlans(maker), WrittenParts()
        self._keys = PostedKeys()
        self._snapshots = HeldSnapshots()
        #: who of the workers is late; the shell looks every `watch.look_s` seconds
        self.watch = LateWatch()
        self.units = Units(node.workers, nonce)
        self._connected, self._said_at, self._tail_code = False, 0.0, EXIT_DONE
        self._welcome: Welcome | None = None
        self._unfit: Leave | None = None
        self._restarts = Restarts()
        #: When it has said Hello last, by the agent's clock and by its wall clock (0: not known).
        self._hello_at = 0.0, 0.0
        #: The last reading of the GPUs, None before the first.
        self._gpus: GpusRead | None = None
        #: The workers that are being ended on trial.
        self._on_trial = set[str]()

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers that fill the node's places now, by index; "" where no other follows one that has ended."""
        return tuple("" if place.ended else place.worker for place in self._places)

    @property
    def committed(self) -> int:
        """The newest step known to be in the coordinator's journal."""
        return self._steps.committed

    @property
    def welcomed(self) -> bool:
        """True while a coordinator has taken the connection."""
        return self._welcome is not None

    @property
    def watch_s(self) -> float:
        """How long the shell may wait from one `tick` to the next, in seconds."""
        return self._welcome.heartbeat_s if self._welcome else WATCH_S

    # ---- life ----

    def start(self, snapshots: NodeSnapshots | None = None) -> list[AgentInstruction]:
        """Fill all places. `snapshots`: what was found of them from before; None: this node keeps none."""
        self._snapshots.begin(snapshots)
        return [self._fill(place, index) for index, place in enumerate(self._places)]

    def tick(self, now: float, stopped: Collection[str]) -> list[AgentInstruction]:
        """Time has passed; `stopped`: workers whose processes are stopped (SIGSTOP) at the moment."""
        if self.over is not None:
            return []
        out: list[AgentInstruction] = []
        welcome = self._welcome
        if welcome is not None:
            standing = self._steps.standing()
            if standing is not None or now - self._said_at > welcome.heartbeat_s / 2:
                out += self._tell(standing or Heartbeat(), now)
        lease_s = welcome.lease_s if welcome else LEASE_S
        for place in self._places:
            if place.looked_at(now, stopped=place.worker in stopped) > lease_s:
                out.append(KillHung(place.worker, "the process was stopped for longer than the lease"))
        return out + self.units.late(now, self.workers)

    def seen(self, *messages: Seen | OutputFailed | AddressProbed, now: float) -> list[AgentInstruction]:
        """Something was seen of the workers."""
        return [said for message in messages for said in self._tell(message, now)]

    def gpus_read(self, gpus: GpusRead, now: float) -> list[AgentInstruction]:
        """Report the GPUs, now and on each later connection."""
        self._gpus = gpus
        return self._tell(gpus, now)

    def end(self, exit_code: int, why: str) -> list[AgentInstruction]:
        """Somebody on this node wants its end."""
        return self._end(EndAgent(exit_code, why))

    # ---- the connection ----

    def connected(self, now: float, *, wall: float = 0.0, unfit: str = "") -> list[AgentInstruction]:
        """A connection to a coordinator stands: say who is here, and what a coordinator must know of it.

        Args:
            wall: what the node's own wall clock shows, 0 for nothing. unfit: why it should not train.
        """
        if self.over is not None:
            return []
        self._connected, self._welcome = True, None
        replay = self._replay()
        kept, rest = fitting(replay)
        self._hello_at = now, wall
        told = self._snapshots.told
        hello = self.node.hello(self.session, self.term, kept, now, unfit, told, self.heard)
        out = self._tell(hello, now)
        if rest is not None:
            out.append(Replay(envelopes(chain((rest,), replay))))
        return out

    def disconnected(self) -> None:
        """The connection has ended, from whichever side."""
        self._connected, self._welcome = False, None
        self.units.uninformed()

    def hear(self, message: CoordinatorMessage, now: float) -> list[AgentInstruction]:
        """Take a message from the coordinator; an injected fault (NodeFault) is the shell's business."""
        if self.over is not None or not self._connected:
            return []
        if isinstance(message, SnapshotOrder | CheckpointOrder):
            return self._asked(message)
        if isinstance(message, NodeOrder):
            return self._order_all(message, now)
        match message:
            case ToWorker():
                return self._order(message)
            case EndHung() | Replace() | CountHang() | WatchWork():
                return self._on_hang_order(message, now)
            case Committed():
                if message.term >= self.term:
                    self._steps.forget_up_to(message.step)
            case Welcome():
                return self._welcomed(message, now)
            case Refused():
                return self._refused(message)
            case EndNode():
                if message.exit_code == EXIT_DONE and all(place.done for place in self._places):
                    return []  # the scripts end by themselves, and the node after them
                return self._end(EndAgent(message.exit_code, message.why, message.alone))
            case _:
                return [Answer(message)] if isinstance(message, Probe | TakeStacks | TakeMemory | ProbeAddress) else []
        return []

    def _welcomed(self, welcome: Welcome, now: float) -> list[AgentInstruction]:
        if welcome.term < self.term:
            return self._leave(f"a coordinator of term {welcome.term} is refused: {self.term} is known")
        self.term = welcome.term
        if welcome.identity != self.heard.identity:
            self.heard = HeardGeneration(identity=welcome.identity)
        self._steps.forget_up_to(welcome.committed)
        self._welcome, self.ever_welcomed = welcome, True
        self._restarts.allowed(welcome.max_restarts, welcome.rules)
        self._plans.told_anew(welcome.members)
        return [
            *self._report_clock(welcome, now),
            *(self._tell(self._gpus, now) if self._gpus is not None else ()),
            *self._admit(),
            *self.units.informed(welcome, now),
            *self._leave_unfit(now),
        ]

    def _report_clock(self, welcome: Welcome, now: float) -> list[AgentInstruction]:
        """Report how far the wall clock is ahead: Welcome was made half a round trip ago, give or take that half."""
        said, wall = self._hello_at
        if not (wall and welcome.time):
            return []
        half_s = max(0.0, now - said) / 2
        return self._tell(ClockOffset(ahead_s=wall + half_s - welcome.time, uncertainty_s=half_s), now)

    def _refused(self, refused: Refused) -> list[AgentInstruction]:
        if not refused.retry:
            return self._end(EndAgent(refused.exit_code, refused.why))
        self.session = self._nonce()  # (nothing that the old workers said may count)
        self.heard = HeardGeneration()
        self._written, self._steps = WrittenParts(), NodeSteps(self._places, self.committed)
        if self._unfit is None:
            fresh = [self._fill(place, index) for index, place in enumerate(self._places)]
        else:  # (it comes back to say why it must go: only who is welcome is heard)
            fresh = [KillHung(place.worker, self._unfit.detail) for place in self._places if not place.ended]
        for place in self._places:
            place.forget()
        # (a node that is only to bring fresh workers has done nothing wrong: the exit code of success)
        blame = refused.exit_code != EXIT_DONE
        return [*fresh, *self._leave(f"expelled: {refused.why}; coming back with new workers", blame=blame)]

    def _leave(self, why: str, *, blame: bool = True) -> list[AgentInstruction]:
        self.disconnected()
        return [Reconnect(why, blame)]

    # ---- orders to the workers ----

    def _order(self, message: ToWorker) -> list[AgentInstruction]:
        place, order = self._place_of(message.worker), message.order
        if self._welcome is None or place is None or not comes_from(order, self.term):
            return []
        place.passed(order)
        return [Pass((place.worker,), order)]

    def _order_all(self, order: NodeOrder, now: float) -> list[AgentInstruction]:
        """Hand an order on to those of the workers that it concerns."""
        if self._welcome is None or not comes_from(order, self.term):
            return []
        if isinstance(order, BeginNode | PrepareNode) and order.plan.rest.generation > self.heard.generation:
            plan, identity = order.plan.rest, self.heard.identity
            self.heard = HeardGeneration(identity=identity, term=plan.term, generation=plan.generation)
        here = {place.worker: place for place in self._places if Attach in place.latest and not place.ended}
        out: list[AgentInstruction] = []
        for said in self._plans.take(order, tuple(here)):
            if isinstance(said, Pass):
                for worker in said.workers:
                    here[worker].passed(said.order)
                out.append(said)
            else:
                out += self._tell(said, now)
        return out

    # ---- what the workers do ----

    def worker_said(self, message: WorkerMessage | UnitWord, now: float) -> list[AgentInstruction]:
        """Keep it, and pass it on at once, but for steps that others tell of, and for what concerns its unit alone."""
        place = self._place_of(message.worker)
        if isinstance(message, CheckpointNews) and self.over is None:
            self._written.keep(message)  # (its worker may be gone by now)
            return self._tell(FromWorker(message=message), now)
        if place is None or self.over is not None:
            return []
        if isinstance(message, UnitWord):
            return [*self._snapshots.needed_by(message), *self.units.take(message, now)]
        out: list[AgentInstruction] = []
        match message:
            case Attach():
                out = self.units.attached(message.worker)
            case KnownSteps():
                self._steps.sent(message)
                return []
            case Applied():
                place.keep(message)
                told = self._steps.applied(place, message, now)
                return self._tell(FromWorker(message=told), now) if told is not None else []
            case Post():
                try:
                    bundles = self._keys.take(message, self._plans.members_of(message.generation))
                except PostedTooMuchError as error:
                    return [KillHung(place.worker, str(error))]
                return [said for bundle in bundles for said in self._tell(bundle, now)]
            case Entered():
                self._steps.begin_with(message.applied, message.generation)
            case Report():
                out = self._tell_of_steps(now)
            case SnapshotTaken():
                taken = self._snapshots.taken(message.snapshot)
                return [*self._tell(FromWorker(message=message), now), *self._holds(taken, now)]
            case _:
                pass
        place.keep(message)
        return [*out, *self._tell(FromWorker(message=message), now)]

    def _tell_of_steps(self, now: float) -> list[AgentInstruction]:
        """Tell of the steps that are kept here alone, perhaps: who has told of them may be dead."""
        pages = self._steps.untold() if self._connected else ()
        return [said for page in pages for said in self._tell(page, now)]

    def worker_ended(self, down: WorkerDown, now: float, *, clean: bool) -> list[AgentInstruction]:
        """A worker's process ended; replace it, or count its part as done.

        Args:
            down: how it ended, for the case that it should not have.
            clean: its exit code is 0, or nobody knows it.
        """
        place = self._place_of(down.worker)
        if place is None or self.over is not None:
            return []
        if place.done:
            return self._ended_in_order(place, now, clean=clean)
        mates = self.units.mates(place.worker)
        if down.has_left_loop and not place.warming:
            # It stays what it was, a member that has applied what it has: nobody is to do anything again.
            if not mates:
                self.units.left(index_of(place.worker))
            place.ended, place.down = True, msgspec.structs.replace(down, applied=place.applied)
            return [*self._tell_of_steps(now), *self._tell(place.down, now)]
        free = down.worker in self._on_trial and down.kind is FailureKind.HANG
        self._on_trial.discard(down.worker)
        return [*self._lost(place, down, now, free=free), *self._gone_along(mates, down.worker, now)]

    def _lost(
        self, place: WorkerPlace, down: WorkerDown, now: float, *, free: bool = False, last: bool = False
    ) -> list[AgentInstruction]:
        """Tell that a worker is gone, and put another process in its place; see `_replace`."""
        cold: list[AgentInstruction] = []
        if warming := place.warming:
            warmed, down = place.failed_warm_up(down)
            cold = self._tell(FromWorker(message=warmed), now)
        return [*cold, *self._tell(down, now), *self._replace(place, down, now, free=free or warming, last=last)]

    def _gone_along(self, mates: Iterable[int], cause: str, now: float) -> list[AgentInstruction]:
        """A unit is whole or not there: the others of it end with the worker that is the cause, whoever that was."""
        out: list[AgentInstruction] = []
        replaced = bool(self.workers[index_of(cause)])
        for place in (self._places[index] for index in mates):
            if place.done or not place.worker:
                continue
            worker, down = place.worker, place.gone_along(cause)
            if not (replaced or place.ended):
                out.append(KillHung(worker, down.detail))
            out += self._lost(place, down, now, free=True, last=not replaced)
        return out

    def _replace(
        self, place: WorkerPlace, down: WorkerDown, now: float, *, free: bool = False, last: bool = False
    ) -> list[AgentInstruction]:
        """Put another process in a place, where that is of any use, and not `last`; `free`: that uses up no try."""
        index = index_of(place.worker)
        self.units.left(index)
        place.refill("")
        # Only its end is replayed: what it said before would look like a worker come back, and what it applied alone
        # may be done again, with another v.
        place.down, place.down_told = down, self._connected
        self._steps.undo_after(max(other.applied for other in self._places))
        if last or down.final or down.exit_code == EXIT_BAD_INPUT or self._unfit is not None:
            place.ended = True  # another process would say the same; the coordinator decides what becomes of the job
        elif why := self._restarts.refuse(down, now, free=free):
            place.ended = True
            reason = "quarantined" if self._restarts.broken(down) else "exhausted"
            self._unfit = Leave(reason=reason, detail=f"node {self.node.node}: {why}"[:8000])
            return self._leave_unfit(now)
        else:
            return [self._fill(place, index)]
        return []

    def _on_hang_order(self, message: EndHung | Replace | CountHang | WatchWork, now: float) -> list[AgentInstruction]:
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
        """End a worker that hangs."""
        if self._place_of(message.worker) is None:
            return []
        if message.on_trial:
            self._on_trial.add(message.worker)
        return [KillHung(message.worker, message.why)]

    def _replace_raised(self, message: Replace, now: float) -> list[AgentInstruction]:
        """Replace a worker whose script has raised; its end is not reported."""
        place = self._place_of(message.worker)
        raised = place.raised_so if place is not None else None
        if place is None or raised is None:
            return []
        mates = self.units.mates(message.worker)
        return [*self._replace(place, raised, now), *self._gone_along(mates, message.worker, now)]

    def _count_hang(self, message: CountHang, now: float) -> list[AgentInstruction]:
        """Count a kill against this node, and leave if that makes too many."""
        why = self._restarts.count(message.worker, message.why, now)
        if not why or self._unfit is not None:
            return []
        self._unfit = Leave(reason="exhausted", detail=f"node {self.node.node}: {why}"[:8000])
        return self._leave_unfit(now)

    def _ended_in_order(self, place: WorkerPlace, now: float, *, clean: bool) -> list[AgentInstruction]:
        place.refill("")
        place.ended = place.done = True
        if not clean:
            self._tail_code = TAIL_FAILED  # the job is done, but the script failed after it
        if not all(place.ended for place in self._places):
            return []
        return [*self._tell(Leave(reason="finished"), now), *self._end(EndAgent(self._tail_code))]

    def _leave_unfit(self, now: float) -> list[AgentInstruction]:
        """The node must go; whoever coordinates hears why first, be it later, and ends it."""
        return self._tell(self._unfit, now) if self._unfit is not None and self._welcome is not None else []

    def _asked(self, message: SnapshotOrder | CheckpointOrder) -> list[AgentInstruction]:
        if isinstance(message, CheckpointOrder):  # (it concerns who has written a part, and where that lies)
            here = tuple(place.worker for place in self._places if Attach in place.latest and not place.ended)
            return [Stow(message), Pass(here, message)] if self.welcomed and comes_from(message, self.term) else []
        return [self._snapshots.obey(message)] if message.term >= self.term else []

    def opened(self, snapshots: NodeSnapshots | None, now: float) -> list[AgentInstruction]:
        """There is room for parts of snapshots, with what lies there; None: there is none."""
        self._snapshots.begin(snapshots)
        return [*self._admit(), *self._holds([], now)]

    def _admit(self) -> list[AgentInstruction]:
        return [AdmitReaders(self._welcome.snapshot_key)] if self._welcome and self._snapshots.told else []

    def fetched(self, part: SnapshotPart, now: float) -> list[AgentInstruction]:
        """A copy of another node's part of a snapshot is here."""
        return self._holds(self._snapshots.fetched(part), now)

    def _holds(self, work: list[SnapshotWork], now: float) -> list[AgentInstruction]:
        """Tell what is held, then do this: nobody is to look for what is gone."""
        return [*(self._tell(told, now) if (told := self._snapshots.told) is not None else ()), *work]

    # ---- what is kept ----

    def _replay(self) -> Iterator[Kept]:
        """What a coordinator must know of the workers, as it stands now: first who is gone, last who has left."""
        life, stand = kept_of_life(self._places), kept_of_stand(self._places)
        return chain(life, self._steps.replay(), self._written.kept, stand)

    # ---- inside ----

    def _fill(self, place: WorkerPlace, index: int) -> StartWorker:
        self.units.left(index)
        place.refill(worker_id(self.node.node, index, self._nonce()))
        return StartWorker(place.worker)

    def _place_of(self, worker: str) -> WorkerPlace | None:
        return next((place for place in self._places if place.worker == worker and not place.ended), None)

    def _tell(self, message: AgentMessage, now: float) -> list[AgentInstruction]:
        self._said_at = now if self._connected else self._said_at
        return [Say(message)] if self._connected else []

    def _end(self, end: EndAgent) -> list[AgentInstruction]:
        if self.over is not None:
            return []
        self.over = end
        return [end]
