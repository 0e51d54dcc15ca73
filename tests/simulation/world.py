"""The shared world of a run: time, randomness, data plane, durable data and living processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from holdfast.coordination.agent.machine import AgentMachine
from holdfast.coordination.config import CoordinatorConfig, PeriodBounds
from holdfast.coordination.job.coordinator import Coordinator
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.planner.fleet.timeline import Timeline
from holdfast.protocol.job_spec import CheckpointSpec, ExperimentSpec, ExpertSpec, JobSpec, RecoverySpec
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan
from holdfast.step_samples import StepSamples
from tests.simulation.climbing import LeveledGroup
from tests.simulation.collectives import Group, Underway
from tests.simulation.durable import CheckpointDirectory, NodeMemory, Relaid, SimJournal, SimStore
from tests.simulation.faults.plans import FaultPlan
from tests.simulation.faults.troubles import DataPlane, Troubles
from tests.simulation.machines.experts.stored import StoredExperts
from tests.simulation.machines.training import SimReceipt, SimSums
from tests.simulation.shared_plans import SharedPlans

#: The start of virtual time, in seconds; large enough that a clock set back by hours stays positive.
START = 100_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Durations as (min, max) in seconds, drawn uniformly."""

    link: tuple[float, float] = (0.0005, 0.003)
    collective: tuple[float, float] = (0.001, 0.01)
    closing: tuple[float, float] = (0.0, 2.0)
    build_timeout_s: float = 1.0
    #: The time after which a hanging transfer fails, in seconds; a peer is paused, hangs or is unreachable. A
    #: collective fails after this time plus the longest time that a member may still compute.
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
            "look": (0.001, 0.3),
            "copy": (0.0005, 0.03),
            "seal": (0.001, 0.05),
            "adopt": (0.0005, 0.005),
        }
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The classes under test; a mutation test replaces one by a broken class."""

    coordinator: type[Coordinator] = Coordinator
    worker: type[WorkerMachine] = WorkerMachine
    agent: type[AgentMachine] = AgentMachine
    store: type[SimStore] = SimStore
    journal: type[SimJournal] = SimJournal


class Delivers(Protocol):
    """A process that can run an action."""

    def deliver(self, action: Callable[..., object], *args: Any) -> None: ...


class Copier(Protocol):
    """Copies a worker's state for a snapshot; the state must not change while it is `active`."""

    active: bool

    def applied(self, plan: GenerationPlan, step: int) -> None: ...

    def stash_state(self, plan: GenerationPlan) -> None: ...


class Peer(Protocol):
    """A worker process, as other processes see it."""

    id: str
    alive: bool
    stopped: bool
    #: Its local rank in the replica group, and the size of the group.
    place: int
    places: int
    machine: WorkerMachine
    #: The model's state; while it is being written it is garbage and `whole` is false.
    state: int
    whole: bool
    gradients: SimSums
    experts: StoredExperts | None
    receipt: SimReceipt | None

    @property
    def copier(self) -> Copier: ...

    def advance(self) -> None: ...

    def climbs(self, operation: Underway) -> bool: ...

    def boundary(self, name: str) -> bool: ...


class World:
    """The shared world of one run; it uses worker processes only through `Peer`."""

    def __init__(self, plan: FaultPlan, parts: Parts, *, keep_trace: bool) -> None:
        self.plan = plan
        self.parts = parts
        self.timing = Timing()
        self.samples = StepSamples(seed=plan.seed, micro_batches=plan.micro_batches, micro_batch=plan.micro_batch)
        self.rng = Random(plan.seed * 7919 + 1)
        self.timeline = Timeline(START)
        self.config = _config(plan)
        self.store = parts.store()
        self.journal = parts.journal()
        self.checkpoints = CheckpointDirectory()
        self.relaid = Relaid()
        self._memories: dict[str, NodeMemory] = {}
        self.data_plane = DataPlane()
        self.plans = SharedPlans()
        #: The time until which the store is slow.
        self.store_slow_until = START
        #: The error of the coordinator's machine clock, and all its errors so far.
        self.clock_off_s, self.clocks_off_s = 0.0, [0.0]
        #: The number of warm-ups that will still fail.
        self.cold_warm_ups = plan.cold_warm_ups
        #: Whether the user has interrupted the job.
        self.interrupted = False
        self.story: deque[tuple[Any, ...]] | None = deque(maxlen=20000) if keep_trace else None
        self._workers: dict[str, Peer] = {}
        self._groups: dict[tuple[int, int], Group] = {}
        self._troubles: dict[str, Troubles] = {}
        self._counter = 0

    def trace(self, *what: Any) -> None:
        """Add a line to the story, if it is kept."""
        if self.story is not None:
            self.story.append((round(self.timeline.now - START, 4), *what))

    # ---- time ----

    def jump(self, seconds: float) -> None:
        """Change the coordinator's machine clock; a running coordinator has read it before."""
        self.clock_off_s += seconds
        self.clocks_off_s.append(self.clock_off_s)

    def shows(self, time: float) -> bool:
        """Return whether a coordinator's clock may have shown this time so far."""
        off = self.clocks_off_s
        return START + min(off) <= time <= self.timeline.now + max(off)

    def after(self, span: str, process: Delivers, action: Callable[..., object], *args: Any) -> None:
        """Run an action in a process after a random duration from `timing`."""
        self.timeline.after(self.rng.uniform(*self.timing.spans[span]), process.deliver, action, *args)

    def after_work(
        self, step: int, micro_batch: int, process: Delivers, node: str, action: Callable[..., object], *args: Any
    ) -> None:
        """Run an action after a node has computed a micro-batch, with the plan's delays."""
        took_s = self.rng.uniform(*self.timing.spans["micro_batch"]) + self.plan.longer_s(step, micro_batch)
        took_s *= self.troubles(node).longer(self.timeline.now)
        self.timeline.after(took_s, process.deliver, action, *args)

    def after_disk(self, span: str, process: Delivers, node: str, action: Callable[..., object], *args: Any) -> None:
        """Run an action after a node's disk operation."""
        delay, slow_s = self.rng.uniform(*self.timing.spans[span]), self.troubles(node).slow_until - self.timeline.now
        self.timeline.after(max(delay, slow_s), process.deliver, action, *args)

    def store_delay(self) -> float:
        """Return the duration of a write to the store, in seconds."""
        slow_s = self.store_slow_until - self.timeline.now
        return self.rng.uniform(0.0, slow_s) if slow_s > 0 else 0.0

    # ---- names and values ----

    def nonce(self) -> str:
        """Return a unique process name."""
        return f"{self.pid():08x}"

    def pid(self) -> int:
        """Return a unique process id."""
        self._counter += 1
        return self._counter

    def garbage(self) -> int:
        """Return a unique value."""
        return -self.pid()

    # ---- nodes and workers ----

    def troubles(self, node: str) -> Troubles:
        """Return the current faults of a node, alive or dead."""
        return self._troubles.setdefault(node, Troubles())

    def memory(self, node: str) -> NodeMemory:
        """Return a node's snapshot memory."""
        return self._memories.setdefault(node, NodeMemory())

    def add_worker(self, worker: Peer) -> None:
        """Register a worker process."""
        self._workers[worker.id] = worker

    def worker(self, name: str) -> Peer | None:
        """Return a worker process, perhaps paused, or None if it is dead."""
        worker = self._workers.get(name)
        return worker if worker is not None and worker.alive else None

    def reaches(self, worker: str, peer: str) -> bool:
        """Return whether data can pass between two workers."""
        return self.data_plane.reaches(node_of(worker), {node_of(peer)})

    def cut_off(self, node: str, nodes: AbstractSet[str]) -> AbstractSet[str]:
        """Return the nodes of `nodes` that `node` cannot reach."""
        plane = self.data_plane
        blocked = {other for other in nodes if plane.blocked(node, other)} if plane.one_way else set[str]()
        if plane.reaches(node, nodes):
            return blocked
        return blocked | {other for other in nodes if not plane.reaches(node, {other})}

    def group(self, plan: GenerationPlan) -> Group:
        """Return the group of a generation, shared by all its members."""
        key = (plan.term, plan.generation)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = self._new_group(plan)
            for member in plan.members:
                if self.worker(member.worker) is None:
                    group.fail(member.worker)
        return group

    def _new_group(self, plan: GenerationPlan) -> Group:
        timeline, rng, duration, data_plane = self.timeline, self.rng, self.timing.collective, self.data_plane
        if self.plan.fan_out:
            fan_out = self.plan.fan_out
            return LeveledGroup(plan, timeline, rng, duration, data_plane, fan_out=fan_out, climbs=self._climbs)
        return Group(plan, timeline, rng, duration, data_plane)

    def _climbs(self, worker: str, operation: Underway) -> bool:
        peer = self.worker(worker)
        return peer is not None and peer.climbs(operation)


def _config(plan: FaultPlan) -> CoordinatorConfig:
    """Return a coordinator's configuration with times that fit the simulation."""
    return CoordinatorConfig(
        identity="simulated",
        spec=_spec(plan),
        lease_s=1.0,
        heartbeat_s=0.3,
        tick_s=0.2,
        report_timeout_s=2.0,
        prepare_timeout_s=3.0,
        join_retry_s=0.3,
        witnesses=plan.witnesses,
        period=PeriodBounds(first_s=0.2, least_s=0.1, most_s=0.6),
        submission=1 if plan.pooled else 0,
        layout_settle_s=0.2,
        return_timeout_s=2.0,
        probe_timeout_s=0.5,
        layout_timeout_s=3.0,
        grant_join_s=3.0,
        save_timeout_s=2.0 if plan.skips_from else 30.0,
    )


def _spec(plan: FaultPlan) -> JobSpec:
    return JobSpec(
        name="sim",
        max_nodes=plan.start_nodes,
        checkpoint=CheckpointSpec(snapshot_every=plan.snapshot_every),
        experts=ExpertSpec(placement="mro", rebalance_every=plan.rebalance_every),
        recovery=RecoverySpec(
            on_node_failure="restart-all" if plan.restart else plan.on_loss,
            stragglers=plan.stragglers,
            on_process_failure="hold" if plan.hold else "auto",
            max_restarts=plan.max_restarts,
            max_skipped_steps=plan.max_skipped,
            fault_threshold=plan.copies,
        ),
        experiments=ExperimentSpec(allow_faults=True, static_experts=plan.ep_size > 0, ep_size=plan.ep_size),
    )
