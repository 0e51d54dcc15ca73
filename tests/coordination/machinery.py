"""A driver for the coordinator's state machine under test, and short constructors of its messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import FrameType
from typing import Any, TypeVar

import msgspec

from holdfast.coordination.agent.instructions import SendToWorkers
from holdfast.coordination.agent.known_plans import KnownPlans
from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.inputs import Disconnected, Input, Received, Tick
from holdfast.coordination.instructions import Broadcast, Close, Emit, EndJob, Instruction, Persist, Send
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.protocol import events as ev
from holdfast.protocol.failures import FailureRule
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.position import Position
from holdfast.protocol.record import KnownCheckpoint, Record

O = TypeVar("O")

MICRO_BATCHES = 6
BATCH = 24


def commit(loss: float = 1.0, *flags: msg.Flag) -> msg.Commit:
    return msg.Commit(grad_square=1.0, loss_sum=loss * BATCH, samples=BATCH, nonfinite=0, flags=flags)


def reduced(loss: float) -> dict[str, Any]:
    """Return the report fields of a step after all its reductions have returned."""
    return {"result": msg.Holding(), "reduced": commit(loss)}


def w(node: str, nonce: str = "a") -> str:
    return msg.worker_id(node, 0, nonce)


def attach(worker: str, model: str = "small", pid: int = 7, experts: msg.ExpertShape | None = None) -> msg.Attach:
    return msg.Attach(
        worker=worker,
        pid=pid,
        host="h",
        state_port=1,
        config={"model": model},
        global_batch=BATCH,
        micro_batches=MICRO_BATCHES,
        expert_shape=experts,
    )


def called(step: int, name: str, generation: int = 1) -> str:
    """Return the checkpoint name that tests use for this step and short name."""
    short = name.lstrip(".").removeprefix("writing-").removeprefix("step-")
    return f"step-{step:08d}-t1-g{generation}-{short.encode().hex()}"


def written(
    node: str, step: int, name: str, *, generation: int = 1, part: int = 0, parts: int = 1
) -> msg.CheckpointWritten:
    return msg.CheckpointWritten(
        worker=w(node),
        term=1,
        generation=generation,
        step=step,
        name=called(step, name, generation),
        part=part,
        parts=parts,
        files=(msg.StoredFile(name=f"part-{part}", bytes=9, sha256="0" * 64),),
        seconds=0.1,
    )


def kept(node: str, step: int, name: str, *, generation: int = 1) -> msg.CheckpointKept:
    return msg.CheckpointKept(
        worker=w(node),
        term=1,
        generation=generation,
        step=step,
        name=called(step, name, generation),
        bytes=9,
        seconds=0.1,
    )


def hello(
    node: str, kept: tuple[msg.WorkerMessage | msg.AppliedSteps, ...] = (), session: str = "", term: int = 0
) -> msg.Hello:
    return msg.Hello(
        protocol=msg.PROTOCOL,
        job="job",
        node=node,
        session=session or f"{ord(node[-1]):08x}",
        term=term,
        agent_pid=1,
        workers=1,
        digest="script",
        kept=kept,
    )


def applied(
    worker: str, generation: int, step: int, v: msg.Commit | None = None, world: int = 3, state_hash: str = ""
) -> msg.Applied:
    told = {"worker": worker, "generation": generation, "step": step, "state_hash": state_hash}
    return msg.Applied(**told, commit=v or commit(), world=world)


def calls(action: Callable[[], object]) -> int:
    """Return the number of function calls, builtins included, that an action makes."""
    count = 0

    def tally(_frame: FrameType, what: str, _arg: object) -> None:
        nonlocal count
        count += what in ("call", "c_call")

    sys.setprofile(tally)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@dataclass
class Job:
    """Drives one coordinator and records its output. `records` and `events` survive it, as store and journal do."""

    nodes: int = 3
    spec: JobSpec = field(default_factory=JobSpec)
    rules: tuple[FailureRule, ...] = ()
    report_timeout_s: float = 5.0
    save_timeout_s: float = 30.0
    submission: int = 0
    now: float = 100.0
    records: list[Record] = field(default_factory=list)
    events: list[ev.AnyEvent] = field(default_factory=list)
    connections: dict[str, int] = field(default_factory=dict)
    last: list[Instruction] = field(default_factory=list)
    #: the plans that each node's agent knows
    plans: dict[str, KnownPlans] = field(default_factory=dict)
    _handed: list[tuple[str, msg.Order]] = field(default_factory=list)
    _number: int = 0

    def boot(
        self,
        tail: Position | None = None,
        *,
        takeover: bool = False,
        checkpoints: Sequence[KnownCheckpoint] = (),
        ended: tuple[int, int] | None = None,
    ) -> Job:
        """Start a coordinator from the durable state; `ended` is passed to `Coordinator`."""
        config = CoordinatorConfig(
            spec=msgspec.structs.replace(self.spec, name="job", max_nodes=self.nodes),
            lease_s=3.0,
            prepare_timeout_s=30.0,
            rules=self.rules,
            takeover=takeover,
            report_timeout_s=self.report_timeout_s,
            save_timeout_s=self.save_timeout_s,
            submission=self.submission,
        )
        record = self.records[-1] if self.records else None
        self.machine = Coordinator(config, tail or reduce(Position.after, self.events, Position()), record, ended)
        self.record_output(self.machine.start(self.now, "url", 1, checkpoints))
        return self

    def record_output(self, instructions: list[Instruction]) -> list[Instruction]:
        self.last, self._handed = instructions, []
        for instruction in instructions:
            if isinstance(instruction, Persist):
                self.records.append(instruction.record)
            elif isinstance(instruction, Emit):
                self.events.append(instruction.event)
            elif isinstance(instruction, Send):
                self._hand_on((instruction.connection,), instruction.message)
            elif isinstance(instruction, Broadcast):
                self._hand_on(instruction.connections, instruction.message)
        return instructions

    def _hand_on(self, connections: Sequence[int], message: msg.CoordinatorMessage) -> None:
        """Handle a message about a generation as agents do; all their known workers have attached."""
        for number in connections:
            node = self.machine.members.on(number)
            known = self.plans.setdefault(node.name if node is not None else "", KnownPlans())
            if isinstance(message, msg.Welcome):
                known.reset_members(message.members)
            elif isinstance(message, msg.NodeOrder) and node is not None:
                for said in known.on_order(message, tuple(node.workers)):
                    if isinstance(said, SendToWorkers):
                        self._handed += [(worker, said.order) for worker in said.workers]
                        continue
                    for answer in self.machine.handle(Received(number, said), self.now):
                        assert isinstance(answer, Send)
                        self._hand_on((answer.connection,), answer.message)

    def feed(self, event: Input, after: float = 0.0) -> list[Instruction]:
        self.now += after
        return self.record_output(self.machine.handle(event, self.now))

    def connect(self, message: msg.Hello) -> list[Instruction]:
        self._number += 1
        self.connections[message.node] = self._number
        return self.feed(Received(self._number, message))

    def deliver(self, message: msg.WorkerMessage, after: float = 0.0) -> list[Instruction]:
        return self.feed(self.received(message), after)

    def received(self, message: msg.WorkerMessage) -> Received:
        """Return the coordinator's input for a worker's message."""
        return Received(self.connections[msg.node_of(message.worker)], msg.FromWorker(message=message))

    def deliver_from(self, node: str, message: msg.AgentMessage) -> list[Instruction]:
        return self.feed(Received(self.connections[node], message))

    def lose(self, node: str) -> list[Instruction]:
        return self.feed(Disconnected(self.connections[node]))

    def tick(self, after: float) -> list[Instruction]:
        return self.feed(Tick(), after)

    def start(self, *, saves: bool = False, in_time: bool = False) -> Job:
        """Start a job and make all nodes enter generation 1; with `saves`, they have a checkpoint directory."""
        self.boot()
        for index in range(self.nodes):
            self.connect(hello(f"n{index}"))
            self.deliver(msgspec.structs.replace(attach(w(f"n{index}")), saves=saves, saves_in_time=in_time))
        for index in range(self.nodes):
            self.deliver(msg.Entered(worker=w(f"n{index}"), generation=1, applied=0))
        return self

    def step(self, step: int, *nodes: str, generation: int = 1) -> None:
        for node in nodes or tuple(f"n{index}" for index in range(self.nodes)):
            self.deliver(applied(w(node), generation, step, world=len(nodes) or self.nodes))

    def join(self, *nodes: str, step: int, received: int = 0) -> tuple[str, ...]:
        """Swap to the pending plan, which adds these nodes, after a step; return all its nodes."""
        plan, pending = self.machine.record.plan, self.machine.record.pending
        assert plan is not None
        assert pending is not None
        assert {*pending.workers} == {*plan.workers, *map(w, nodes)}
        generation = pending.generation
        for worker in pending.workers:
            self.deliver(msg.Prepared(worker=worker, generation=generation))
        for worker in plan.workers:
            self.deliver(applied(worker, plan.generation, step, commit(1.0, msg.Flag.SWAP)))
        for worker in pending.workers:
            got = received if msg.node_of(worker) in nodes else 0
            self.deliver(msg.Entered(worker=worker, generation=generation, applied=step, received_bytes=got))
        return tuple(map(msg.node_of, pending.workers))

    def report(self, node: str, at: int | None, phase: msg.Phase = msg.Phase.COMPUTE, **fields: object) -> None:
        """Answer the current Stop."""
        stop = self.machine.context.interruption.stop
        assert stop is not None
        step = 1 if at is None else at + 1
        self.deliver(
            msg.Report(
                worker=w(node), term=stop.term, generation=stop.generation, applied=at, step=step, phase=phase, **fields
            )  # pyright: ignore[reportArgumentType]
        )

    # ---- the output for the last input ----

    def orders(self, kind: type[O]) -> dict[str, O]:
        """Return the last input's orders of a kind, by worker."""
        sent = [i.message for i in self.last if isinstance(i, Send) and isinstance(i.message, msg.ToWorker)]
        orders = {message.worker: message.order for message in sent if isinstance(message.order, kind)}
        for i in self.last:
            if isinstance(i, Send) and isinstance(i.message, msg.CheckpointOrder) and isinstance(i.message, kind):
                orders[w(self.machine.members.on(i.connection).name)] = i.message
        return orders | {worker: order for worker, order in self._handed if isinstance(order, kind)}

    def sent(self, kind: type[O]) -> list[O]:
        """Return the last input's messages of a kind, one for each receiving agent."""
        sent = [(1, i.message) for i in self.last if isinstance(i, Send)]
        sent += [(len(i.connections), i.message) for i in self.last if isinstance(i, Broadcast)]
        return [message for times, message in sent if isinstance(message, kind) for _ in range(times)]

    def last_events(self) -> list[ev.AnyEvent]:
        return [i.event for i in self.last if isinstance(i, Emit)]

    def emitted(self, kind: type[O]) -> list[O]:
        return [i.event for i in self.last if isinstance(i, Emit) and isinstance(i.event, kind)]

    @property
    def kinds(self) -> list[str]:
        """Return short names of the last input's instructions."""
        out: list[str] = []
        for i in self.last:
            match i:
                case Persist():
                    out.append("persist")
                case Emit(event):
                    out.append(type(event).__name__)
                case Send(_, msg.ToWorker(order=order)):
                    out.append(type(order).__name__)
                case Send(_, message):
                    out.append(type(message).__name__)
                case Broadcast(numbers, message):
                    out += [type(message).__name__] * len(numbers)
                case Close():
                    out.append("close")
                case EndJob():
                    out.append("end")
        return out
