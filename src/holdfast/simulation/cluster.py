"""A cluster of failing machines under one virtual clock, and the run of a fault plan on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from holdfast.coordination.agent.machine import AgentMachine
from holdfast.coordination.coordinator import Coordinator
from holdfast.coordination.inputs import CoordinatorConfig, Shutdown
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.errors import EXIT_INTERRUPTED
from holdfast.protocol.checkpoint_names import CheckpointName, parse_name
from holdfast.protocol.messages import any_side as msg
from holdfast.simulation.clock import Timeline
from holdfast.simulation.collectives import Group
from holdfast.simulation.faults.injection import Injector
from holdfast.simulation.faults.plans import THREAD_BOUNDARIES, FaultPlan
from holdfast.simulation.faults.troubles import DataPlane, Troubles
from holdfast.simulation.invariants import Checker
from holdfast.simulation.machines.agent import SimAgent
from holdfast.simulation.machines.coordinator import CoordinatorShell
from holdfast.simulation.machines.durable import CheckpointDirectory, CheckpointFile, MemoryJournal, MemoryStore
from holdfast.simulation.machines.process import Process
from holdfast.simulation.machines.worker import SimWorker
from holdfast.simulation.network import Connection


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long things take: (least, most) seconds, drawn evenly."""

    link: tuple[float, float] = (0.0005, 0.003)
    collective: tuple[float, float] = (0.001, 0.01)
    closing: tuple[float, float] = (0.0, 2.0)
    build_timeout_s: float = 1.0
    #: after which a collective or a transfer fails that hangs: a peer is stopped, hangs, or cannot be reached
    operation_timeout_s: float = 2.5
    spans: dict[str, tuple[float, float]] = field(
        default_factory=lambda: {
            "start": (0.01, 0.1),
            "restart": (0.05, 0.3),
            "exit": (0.0, 0.02),
            "reconnect": (0.02, 0.3),
            "micro_batch": (0.01, 0.03),
            "pause": (0.0, 0.002),
            "apply": (0.002, 0.01),
            "abandon": (0.0005, 0.01),
            "build": (0.005, 0.03),
            "load": (0.02, 0.1),
            "transfer": (0.01, 0.1),
            "retry": (0.005, 0.02),
            "checkpoint": (0.02, 0.2),
            "rename": (0.001, 0.01),
            "plan": (0.001, 0.15),
        }
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What is under test; a mutation test puts broken ones here."""

    coordinator: type[Coordinator] = Coordinator
    worker: type[WorkerMachine] = WorkerMachine
    agent: type[AgentMachine] = AgentMachine
    store: type[MemoryStore] = MemoryStore
    journal: type[MemoryJournal] = MemoryJournal


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended; `events` counts the simulation's own."""

    exit_code: int
    why: str
    time: float
    events: int


class Cluster:
    """Everything of one run. Deterministic: the same plan and parts give the same run."""

    def __init__(self, plan: FaultPlan, parts: Parts | None = None, *, keep_trace: bool = False) -> None:
        self.plan = plan
        self.parts = parts or Parts()
        self.timing = Timing()
        self.rng = Random(plan.seed * 7919 + 1)
        self.timeline = Timeline(1000.0)
        self.config = CoordinatorConfig(
            job="sim",
            start_nodes=plan.start_nodes,
            lease_s=1.0,
            heartbeat_s=0.3,
            tick_s=0.2,
            report_timeout_s=2.0,
            prepare_timeout_s=3.0,
            join_retry_s=0.3,
            allow_faults=True,
            static_experts=plan.ep_size > 0,
            ep_size=plan.ep_size,
            on_failure="restart" if plan.restart else "reconfigure",
            strategy="mro",
            rebalance_every=plan.rebalance_every,
        )
        self.store = self.parts.store()
        self.journal = self.parts.journal()
        self.checkpoints = CheckpointDirectory()
        self.checker = Checker(self)
        self.agents: dict[str, SimAgent] = {}
        self.coordinator: CoordinatorShell | None = None
        self._coordinators: list[CoordinatorShell] = []
        self.ended: tuple[int, str] | None = None
        #: its user wants the job to end
        self.interrupted = False
        self.story: deque[tuple[Any, ...]] | None = deque(maxlen=20000) if keep_trace else None
        self.injector = Injector(self, plan)
        self._workers: dict[str, SimWorker] = {}
        self._groups: dict[tuple[int, int], Group] = {}
        self._homeless: list[SimAgent] = []
        self._counter = 0
        self._writes = 0
        self._troubles: dict[str, Troubles] = {}
        self.data_plane = DataPlane()

    # ---- running ----

    def run(self) -> Outcome:
        """Run the plan to its end.

        Raises:
            InvariantError: something that must never happen did.
        """
        self.start_coordinator()
        for index in range(self.plan.nodes):
            self.timeline.after(self.rng.uniform(0.0, self.plan.start_spread), self.add_node, f"n{index}")
        self.injector.arm()
        steps, patience_s = 0, self.patience_s
        while not self.over:
            self.timeline.step()
            steps += 1
            if self.timeline.now > max(self.injector.quiet_from, self.checker.progress_at) + patience_s:
                self.checker.stuck()
        self.checker.finished()
        assert self.ended is not None
        return Outcome(exit_code=self.ended[0], why=self.ended[1], time=self.timeline.now - 1000.0, events=steps)

    @property
    def patience_s(self) -> float:
        """For how long a job may make no progress once nothing goes wrong any more: two leases and a group's time."""
        return 2 * self.config.lease_s + self.timing.build_timeout_s

    @property
    def over(self) -> bool:
        """True when the job has ended and no agent is left (whom an interrupted job leaves, its launcher ends)."""
        return self.ended is not None and (self.interrupted or not any(agent.alive for agent in self.agents.values()))

    def trace(self, *what: Any) -> None:
        """Keep a line of the story, where it is wanted."""
        if self.story is not None:
            self.story.append((round(self.timeline.now - 1000.0, 4), *what))

    def after(self, span: str, process: Process, action: Callable[..., object], *args: Any) -> None:
        """Let something happen in a process after a time that is drawn from `timing`."""
        self.timeline.after(self.rng.uniform(*self.timing.spans[span]), process.deliver, action, *args)

    def after_disk(self, span: str, process: Process, node: str, action: Callable[..., object], *args: Any) -> None:
        """The same for what goes to a node's disk."""
        delay, slow_s = self.rng.uniform(*self.timing.spans[span]), self.troubles(node).slow_until - self.timeline.now
        self.timeline.after(max(delay, slow_s), process.deliver, action, *args)

    def nonce(self) -> str:
        """Return a name that no other process has."""
        self._counter += 1
        return f"{self._counter:08x}"

    def pid(self) -> int:
        """Return a process id that no other process has."""
        self._counter += 1
        return self._counter

    def garbage(self) -> int:
        """Return a value that is nowhere else."""
        self._counter += 1
        return -self._counter

    # ---- nodes ----

    def add_node(self, name: str) -> None:
        """Start a node's agent, unless one of that name lives."""
        known = self.agents.get(name)
        if known is not None and known.alive:
            return
        self.trace(name, "starts")
        agent = self.agents[name] = SimAgent(self, name)
        agent.boot()

    def troubles(self, node: str) -> Troubles:
        """Return what is wrong with a node, alive or not."""
        return self._troubles.setdefault(node, Troubles())

    def add_worker(self, worker: SimWorker) -> None:
        """Note a worker process."""
        self._workers[worker.id] = worker

    def worker(self, name: str) -> SimWorker | None:
        """Return a living worker process (perhaps stopped), None where it is dead."""
        worker = self._workers.get(name)
        return worker if worker is not None and worker.alive else None

    def reaches(self, worker: SimWorker, peer: str) -> bool:
        """Tell whether data can pass between a worker and another one."""
        return self.data_plane.reaches(worker.agent.name, [msg.node_of(peer)])

    def group(self, plan: msg.GenerationPlan) -> Group:
        """Return the group of a generation, the same for all its members."""
        key = (plan.term, plan.generation)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(plan, self.timeline, self.rng, self.timing.collective, self.data_plane)
            for member in plan.members:
                if self.worker(member.worker) is None:
                    group.failed = True
        return group

    def boundary(self, worker: SimWorker, name: str) -> bool:
        """Let the plan strike a worker here; True where it is dead now, or hangs."""
        worker.at = name
        injector = self.injector
        if injector.watching:
            injector.at_boundary(worker, name)
        in_thread = name in THREAD_BOUNDARIES
        worker.hung = worker.hung or (worker.hanging and in_thread)
        return not worker.alive or (worker.hung and in_thread)

    # ---- checkpoints ----

    def write_checkpoint(self, plan: msg.GenerationPlan, step: int, state: int) -> CheckpointName:
        """Put a complete checkpoint under a temporary name; return what it is called."""
        name = CheckpointName(term=plan.term, generation=plan.generation, step=step, nonce=self.nonce())
        self.checkpoints.files[name.writing] = CheckpointFile(step=step, state=state)
        return name

    def keep_checkpoint(self, worker: SimWorker, order: msg.AcceptCheckpoint) -> None:
        """Give an accepted checkpoint its final name, unless it is not whole any more."""
        files, name = self.checkpoints.files, parse_name(order.name)
        if name.writing in files:
            files[name.final] = files.pop(name.writing)
        file = files.get(name.final)
        if file is None or file.damaged:
            return
        worker.tell(
            msg.CheckpointKept(
                worker=worker.id,
                term=order.term,
                generation=order.generation,
                step=order.step,
                name=name.final,
                bytes=1,
                seconds=0.1,
            )
        )

    def prune_checkpoints(self, order: msg.PruneCheckpoints) -> None:
        """Remove checkpoints, kept or not."""
        for name in order.names:
            self.checker.pruned(name)
            self.checkpoints.files.pop(name, None)

    # ---- coordinators ----

    def start_coordinator(self) -> None:
        """Start a coordinator from what the store and the journal hold; waiting agents find it."""
        if self.coordinator is not None and self.coordinator.alive and not self.coordinator.stopped:
            return
        shell = self.coordinator = CoordinatorShell(self, self.pid())
        self._coordinators.append(shell)
        self.trace("coordinator", shell.pid, "starts", self.store.version)
        shell.boot()
        homeless, self._homeless = self._homeless, []
        for agent in homeless:
            self.after("reconnect", agent, agent.connect)

    def interrupt(self) -> None:
        """Ask the job to save what it has led to and to end; ask again, as its launcher does, until it has."""
        self.interrupted = True
        shell = self.coordinator
        if shell is not None:
            shell.deliver(shell.feed, Shutdown(EXIT_INTERRUPTED, "Ctrl-C", save=True))
        if not self.over:
            self.timeline.after(0.5, self.interrupt)

    def supersede(self) -> None:
        """Start another coordinator beside the one that is paused."""
        old = self.coordinator
        self.start_coordinator()
        if old is None or self.coordinator is old:
            return
        for agent in self.agents.values():
            self.after("reconnect", agent, agent.reconnect_to_new)

    def coordinator_gone(self, shell: CoordinatorShell) -> None:
        """A coordinator died; the plan says for how long there is none."""
        if shell is self.coordinator:
            self.coordinator = None
            self.timeline.after(self.injector.down_s, self.start_coordinator)
            self.injector.extend(self.injector.down_s)

    def power_cut(self) -> None:
        """The machine of store, journal and all coordinators goes down, and with it what is not on disk."""
        self.trace("power cut")
        for shell in self._coordinators:
            shell.crash()
        self.store.power_cut()
        self.journal.power_cut(self.rng)
        self.checker.journal_cut()

    def cut_journal(self, length: int) -> None:
        """While there is no coordinator, somebody leaves only the first `length` events in the journal."""
        self.trace("journal cut", length)
        self.journal.cut(length)
        self.checker.journal_cut()

    def connect(self, agent: SimAgent) -> Connection | None:
        """Connect an agent; None where nobody listens: it will be woken when somebody does."""
        shell = self.coordinator
        if shell is None or not shell.alive:
            self._homeless.append(agent)
            return None
        number = self.pid()
        connection = shell.connections[number] = Connection(self, number, agent, shell)
        return connection

    def write_due(self, shell: CoordinatorShell, what: str) -> bool:
        """Count a coordinator's write of a kind; True where it dies before it."""
        self._writes += 1
        if self.injector.dies_before(self._writes):
            self.injector.note_coordinator(f"crash before {what}")
            self.injector.down_s = self.plan.crash_down_s
            if self.plan.power_cuts:
                self.power_cut()
            else:
                shell.crash()
            return True
        return not shell.alive

    @property
    def writes(self) -> int:
        """How many writes coordinators have made."""
        return self._writes

    def job_ended(self, exit_code: int, why: str) -> None:
        """A coordinator says that the job is over."""
        self.ended = (exit_code, why)
        self.checker.job_ended(exit_code, why)


def run_plan(plan: FaultPlan, parts: Parts | None = None) -> Outcome:
    """Run one plan.

    Raises:
        InvariantError: with the plan in its message.
    """
    return Cluster(plan, parts).run()
