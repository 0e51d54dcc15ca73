"""A node's agent as a machine: what it keeps and says again, whom it obeys, which workers it replaces, when it ends.

The shell (control, or the simulation) calls a method for whatever happens and carries out what comes back, in order.
It holds the connection and the processes; all that is decided is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from holdfast.coordination.agent.kept_steps import KeptSteps
from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from holdfast.protocol.messages.agent import (
    AgentMessage,
    AppliedSteps,
    Committed,
    CoordinatorMessage,
    EndNode,
    FromWorker,
    Heartbeat,
    Hello,
    Kept,
    Leave,
    Refused,
    ToWorker,
    Welcome,
    WorkerDown,
)
from holdfast.protocol.messages.orders import Arm, Begin, JobDone, Order, Prepare, PruneCheckpoints, Stop, Void
from holdfast.protocol.messages.worker import (
    Applied,
    Attach,
    Begun,
    CheckpointKept,
    CheckpointWritten,
    Entered,
    Fault,
    Finished,
    Loads,
    Prepared,
    Report,
    ScriptFailed,
    WorkerMessage,
)
from holdfast.protocol.names import PROTOCOL, index_of, worker_id

#: how a node ends where the job is done but a script failed after it
TAIL_FAILED = 3
MAX_DEATHS = 3
DEATHS_WITHIN_S = 300.0
#: until a coordinator has said its own
LEASE_S = 3.0
WATCH_S = 0.1

#: Of these kinds only the latest is kept. The replay of a node: what its workers are, what they applied, where they
#: stand. So a report comes after the steps that it speaks of: nobody takes a step for lost that is on its way.
_LIFE = (Attach, Begun, Entered)
_STAND = (Prepared, Report, Fault, Finished, CheckpointWritten, CheckpointKept, Loads, ScriptFailed)
#: what a newer generation makes worthless
_GENERATION_BOUND = (Prepared, Report, Fault, Finished)
#: of a message of a megabyte, this much is left to Hello's other fields
_HELLO_BYTES = (1 << 20) - (1 << 14)


# ---- instructions: what the shell must do, in order ----


@dataclass(frozen=True, slots=True)
class Say:
    """Send to the coordinator on the connection that stands."""

    message: AgentMessage


@dataclass(frozen=True, slots=True)
class Replay:
    """Send these as there is room for them, and before all that is said from now on."""

    messages: Iterator[AgentMessage]


@dataclass(frozen=True, slots=True)
class Pass:
    """Hand an order to its worker; one that is gone is no error."""

    message: ToWorker


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Fill the place of this worker with a new process; one that is there is killed, its end is of no interest."""

    worker: str


@dataclass(frozen=True, slots=True)
class KillHung:
    """Kill this worker's process: it has been stopped for longer than a lease. Its end is to be told as a hang."""

    worker: str


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Give the connection up and look for the coordinator again. `blame`: somebody did something wrong."""

    why: str
    blame: bool = True


@dataclass(frozen=True, slots=True)
class EndAgent:
    """End the workers that are left, then the agent. `alone`: nobody else says why."""

    exit_code: int
    why: str = ""
    alone: bool = False


AgentInstruction = Say | Replay | Pass | StartWorker | KillHung | Reconnect | EndAgent


# ---- the machine ----


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeIdentity:
    """What an agent says of its node in every Hello."""

    job: str
    node: str
    workers: int
    digest: str
    agent_pid: int
    rack: str = ""


class DeathCount:
    """Counts the deaths of one worker slot, to tell a bad machine from bad luck."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._committed = 0

    def died(self, now: float, committed: int) -> bool:
        """Count a death; True: too many without a committed step in between, the node must go."""
        if committed > self._committed:
            self._times.clear()
        self._committed = committed
        self._times.append(now)
        while self._times[0] < now - DEATHS_WITHIN_S:
            self._times.popleft()
        return len(self._times) > MAX_DEATHS


@dataclass(slots=True)
class _Slot:
    """One worker's place on the node; what is kept of the worker that fills it now."""

    worker: str = ""
    latest: dict[type, WorkerMessage] = field(default_factory=dict[type, WorkerMessage])
    #: the newest step that it has applied, and in which generation
    top: int = 0
    top_generation: int = 0
    #: how the worker before this one ended, until this one attaches; or how this one did, that left its loop
    down: WorkerDown | None = None
    #: the worker was told that the job is done
    done: bool = False
    #: its process has ended, and no other follows
    ended: bool = False
    stopped_since: float | None = None
    deaths: DeathCount = field(default_factory=DeathCount)

    def renew(self, worker: str) -> None:
        """Make the place for another worker."""
        self.worker = worker
        self.latest.clear()
        self.top = self.top_generation = 0
        self.done = self.ended = False
        self.stopped_since = None

    def keep(self, message: WorkerMessage) -> None:
        """Remember what its worker says."""
        if isinstance(message, Applied):
            self.top, self.top_generation = max(self.top, message.step), message.generation
        elif isinstance(message, _LIFE + _STAND):
            self.latest[type(message)] = message
        if isinstance(message, Attach):
            self.down = None
        if isinstance(message, Entered):
            for kind in _GENERATION_BOUND:
                kept = self.latest.get(kind)
                if isinstance(kept, _GENERATION_BOUND) and kept.generation < message.generation:
                    del self.latest[kind]

    @property
    def applied(self) -> int:
        """The newest step whose state its worker has."""
        entered = self.latest.get(Entered)
        return max(self.top, entered.applied if isinstance(entered, Entered) else 0)

    def kept(self, kinds: tuple[type, ...]) -> list[WorkerMessage]:
        """Return what is kept of some kinds, in their order."""
        return [self.latest[kind] for kind in kinds if kind in self.latest]


class AgentMachine:
    """One node's agent, from its start to its end.

    Args:
        nonce: gives a name (8 to 32 hexadecimal digits) that nobody else has, at each call another one.
    """

    def __init__(self, node: NodeIdentity, nonce: Callable[[], str]) -> None:
        self.node = node
        #: the highest term of a coordinator seen, and the newest step known to be in its journal
        self.term = 0
        self.committed = 0
        self.session = nonce()
        self.over: EndAgent | None = None
        self.ever_welcomed = False
        self._nonce = nonce
        self._slots = [_Slot() for _ in range(node.workers)]
        self._steps = KeptSteps()
        self._connected = False
        self._welcome: Welcome | None = None
        self._said_at = 0.0
        self._tail_code = EXIT_DONE
        self._quarantined: Leave | None = None

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers that fill the node's places now, by index; "" where no other follows one that has ended."""
        return tuple("" if slot.ended else slot.worker for slot in self._slots)

    @property
    def welcomed(self) -> bool:
        """True while a coordinator has taken the connection."""
        return self._welcome is not None

    @property
    def watch_s(self) -> float:
        """How long the shell may wait from one `tick` to the next, in seconds."""
        return self._welcome.heartbeat_s if self._welcome else WATCH_S

    # ---- life ----

    def start(self) -> list[AgentInstruction]:
        """Fill all places."""
        return [self._fill(slot, index) for index, slot in enumerate(self._slots)]

    def tick(self, now: float, stopped: Collection[str]) -> list[AgentInstruction]:
        """Time has passed; `stopped`: workers whose processes are stopped (SIGSTOP) at the moment."""
        if self.over is not None:
            return []
        out: list[AgentInstruction] = []
        welcome = self._welcome
        if welcome is not None and now - self._said_at > welcome.heartbeat_s / 2:
            out += self._tell(Heartbeat(), now)
        lease_s = welcome.lease_s if welcome else LEASE_S
        for slot in self._slots:
            if slot.worker not in stopped or slot.ended:
                slot.stopped_since = None
            elif slot.stopped_since is None:
                slot.stopped_since = now
            elif now - slot.stopped_since > lease_s:
                out.append(KillHung(slot.worker))
        return out

    def end(self, exit_code: int, why: str) -> list[AgentInstruction]:
        """Somebody on this node wants its end."""
        return self._end(EndAgent(exit_code, why))

    # ---- the connection ----

    def connected(self, now: float) -> list[AgentInstruction]:
        """A connection to a coordinator stands: say who is here, and what a coordinator must know of it."""
        if self.over is not None:
            return []
        self._connected, self._welcome = True, None
        replay = self._replay()
        kept, rest = _fitting(replay)
        node = self.node
        hello = Hello(
            protocol=PROTOCOL,
            job=node.job,
            node=node.node,
            session=self.session,
            term=self.term,
            agent_pid=node.agent_pid,
            workers=node.workers,
            digest=node.digest,
            rack=node.rack,
            kept=kept,
            clock=now,
        )
        out = self._tell(hello, now)
        if rest is not None:
            out.append(Replay(_envelopes(chain((rest,), replay))))
        return out

    def disconnected(self) -> None:
        """The connection has ended, from whichever side."""
        self._connected, self._welcome = False, None

    def hear(self, message: CoordinatorMessage, now: float) -> list[AgentInstruction]:
        """Take a message from the coordinator; an injected fault (NodeFault) is the shell's business."""
        if self.over is not None or not self._connected:
            return []
        match message:
            case ToWorker():
                return self._order(message)
            case Committed():
                if message.term >= self.term:
                    self._forget_up_to(message.step)
            case Welcome():
                return self._welcomed(message, now)
            case Refused():
                return self._refused(message)
            case EndNode():
                if message.exit_code == EXIT_DONE and all(slot.done for slot in self._slots):
                    return []  # the scripts end by themselves, and the node after them
                return self._end(EndAgent(message.exit_code, message.why, message.alone))
            case _:
                pass
        return []

    def _welcomed(self, welcome: Welcome, now: float) -> list[AgentInstruction]:
        if welcome.term < self.term:
            return self._leave(f"a coordinator of term {welcome.term} is refused: {self.term} is known")
        self.term = welcome.term
        self._forget_up_to(welcome.committed)
        self._welcome, self.ever_welcomed = welcome, True
        return self._leave_quarantined(now)

    def _refused(self, refused: Refused) -> list[AgentInstruction]:
        if not refused.retry:
            return self._end(EndAgent(refused.exit_code, refused.why))
        # Nothing that the old workers said may count: new ones, and a new session.
        self.session, self._steps = self._nonce(), KeptSteps()
        fresh = [self._fill(slot, index) for index, slot in enumerate(self._slots)]
        for slot in self._slots:
            slot.down = None
        # (a node that is only to bring fresh workers has done nothing wrong: the exit code of success)
        blame = refused.exit_code != EXIT_DONE
        return [*fresh, *self._leave(f"expelled: {refused.why}; coming back with new workers", blame=blame)]

    def _leave(self, why: str, *, blame: bool = True) -> list[AgentInstruction]:
        self.disconnected()
        return [Reconnect(why, blame)]

    # ---- orders to the workers ----

    def _order(self, message: ToWorker) -> list[AgentInstruction]:
        slot, order = self._slot_of(message.worker), message.order
        if self._welcome is None or slot is None or not self._accepts(order):
            return []
        if isinstance(order, JobDone):
            slot.done = True
        elif isinstance(order, Begin):
            # From here on it is not fresh any more, whether it has come to reading this or not.
            slot.keep(Begun(worker=slot.worker, generation=order.plan.generation))
        return [Pass(message)]

    def _accepts(self, order: Order) -> bool:
        """Tell whether an order comes from the newest coordinator known."""
        match order:
            case Begin(plan=plan) | Prepare(plan=plan):
                return plan.term >= self.term
            case Stop(term=term) | Arm(term=term) | Void(term=term) | PruneCheckpoints(term=term):
                return term >= self.term
            case _:
                return True  # carries no term: the connection's Welcome vouches for it

    # ---- what the workers do ----

    def worker_said(self, message: WorkerMessage, now: float) -> list[AgentInstruction]:
        """Keep it, and pass it on at once."""
        slot = self._slot_of(message.worker)
        if slot is None or self.over is not None:
            return []
        if isinstance(message, Entered):
            self._undo_after(message.applied, message.generation)
        slot.keep(message)
        if isinstance(message, Applied) and message.step > self.committed:
            self._steps.note(message, now)
        return self._tell(FromWorker(message=message), now)

    def worker_ended(self, down: WorkerDown, now: float, *, clean: bool) -> list[AgentInstruction]:
        """A worker's process ended; replace it, or count its part as done.

        Args:
            down: how it ended, for the case that it should not have.
            clean: its exit code is 0, or nobody knows it.
        """
        slot = self._slot_of(down.worker)
        if slot is None or self.over is not None:
            return []
        if slot.done:
            return self._ended_in_order(slot, now, clean=clean)
        if down.left:
            # It stays what it was, a member that has applied what it has: nobody is to do anything again.
            slot.ended, slot.down = True, msgspec.structs.replace(down, applied=slot.applied)
            return self._tell(slot.down, now)
        out = self._tell(down, now)
        index = index_of(slot.worker)
        slot.renew("")
        # Only its end is replayed: what it said before would look like a worker come back, and what it applied alone
        # may be done again, with another v.
        slot.down = down
        self._steps.undo_after(max(other.top for other in self._slots))
        if down.final or down.exit_code == EXIT_BAD_INPUT:
            slot.ended = True  # another process would say the same; the coordinator decides what becomes of the job
        elif slot.deaths.died(now, self.committed):
            slot.ended = True
            why = f"the workers of {self.node.node} fail again and again: {down.detail}"
            self._quarantined = Leave(reason="quarantined", detail=why[:8000])
            out += self._leave_quarantined(now)
        else:
            out.append(self._fill(slot, index))
        return out

    def _ended_in_order(self, slot: _Slot, now: float, *, clean: bool) -> list[AgentInstruction]:
        slot.renew("")
        slot.ended = slot.done = True
        if not clean:
            self._tail_code = TAIL_FAILED  # the job is done, but the script failed after it
        if not all(slot.ended for slot in self._slots):
            return []
        return [*self._tell(Leave(reason="finished"), now), *self._end(EndAgent(self._tail_code))]

    def _leave_quarantined(self, now: float) -> list[AgentInstruction]:
        """The node must go; whoever coordinates hears why first, be it later."""
        leave = self._quarantined
        if leave is None or self._welcome is None:
            return []
        return [*self._tell(leave, now), *self._end(EndAgent(EXIT_FAILED, leave.detail))]

    # ---- what is kept ----

    def _replay(self) -> Iterator[Kept]:
        """What a coordinator must know of the workers, as it stands now: first who is gone, last who has left."""
        gone = [slot.down for slot in self._slots if slot.down is not None and not slot.down.left]
        left = [slot.down for slot in self._slots if slot.down is not None and slot.down.left]
        life = [message for slot in self._slots for message in slot.kept(_LIFE)]
        tops = {slot.worker: slot.top for slot in self._slots if slot.top > self.committed}
        stand = [message for slot in self._slots for message in slot.kept(_STAND)]
        pages = self._steps.pages(tops, self.committed) if tops else ()
        return chain(gone, life, pages, self._steps.odd, stand, left)

    def _undo_after(self, step: int, generation: int) -> None:
        """`generation` begins with the state of `step`: what was done after it in older ones never counted."""
        self._steps.undo_after(step, generation)
        for slot in self._slots:
            if slot.top_generation < generation:
                slot.top = min(slot.top, step)
        # After a roll-back steps are committed once more; until then nothing after it is in the journal.
        self.committed = min(self.committed, step)

    def _forget_up_to(self, step: int) -> None:
        self.committed = max(self.committed, step)
        self._steps.forget_up_to(self.committed)

    # ---- inside ----

    def _fill(self, slot: _Slot, index: int) -> StartWorker:
        slot.renew(worker_id(self.node.node, index, self._nonce()))
        return StartWorker(slot.worker)

    def _slot_of(self, worker: str) -> _Slot | None:
        return next((slot for slot in self._slots if slot.worker == worker and not slot.ended), None)

    def _tell(self, message: AgentMessage, now: float) -> list[AgentInstruction]:
        if not self._connected:
            return []
        self._said_at = now
        return [Say(message)]

    def _end(self, end: EndAgent) -> list[AgentInstruction]:
        if self.over is not None:
            return []
        self.over = end
        return [end]


def _fitting(
    messages: Iterator[Kept],
) -> tuple[tuple[Kept, ...], Kept | None]:
    """Take from `messages` what fits into Hello, one page of steps at most; also return what was taken too much."""
    kept: list[Kept] = []
    room, pages = _HELLO_BYTES, 1
    for message in messages:
        pages -= isinstance(message, AppliedSteps)
        room -= len(msgspec.msgpack.encode(message)) + 8
        if room < 0 or pages < 0:
            return tuple(kept), message
        kept.append(message)
    return tuple(kept), None


def _envelopes(messages: Iterable[Kept]) -> Iterator[AgentMessage]:
    for message in messages:
        yield message if isinstance(message, AppliedSteps | WorkerDown) else FromWorker(message=message)
