"""What all processes of one run share: time, chance, the data plane, what outlives a process, who lives."""

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

#: where virtual time begins, in seconds: so late that no clock that is set back by hours shows less than 0
START = 100_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long things take: (least, most) seconds, drawn evenly."""

    link: tuple[float, float] = (0.0005, 0.003)
    collective: tuple[float, float] = (0.001, 0.01)
    closing: tuple[float, float] = (0.0, 2.0)
    build_timeout_s: float = 1.0
    #: A hanging transfer fails after this many seconds: a peer is stopped, hangs, or cannot be reached. A collective
    #: fails after these and the longest time that a member may still compute.
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
    """What is under test; a mutation test puts broken ones here."""

    coordinator: type[Coordinator] = Coordinator
    worker: type[WorkerMachine] = WorkerMachine
    agent: type[AgentMachine] = AgentMachine
    store: type[SimStore] = SimStore
    journal: type[SimJournal] = SimJournal


class Delivers(Protocol):
    """A process, for those that let something happen in it."""

    def deliver(self, action: Callable[..., object], *args: Any) -> None: ...


class Copier(Protocol):
    """Copies a worker's state for a snapshot; while it is `active` the state must not change."""

    active: bool

    def applied(self, plan: GenerationPlan, step: int) -> None: ...

    def put_away(self, plan: GenerationPlan) -> None: ...


class Peer(Protocol):
    """What others see of a worker process, and what they put into it."""

    id: str
    alive: bool
    stopped: bool
    #: which part of a replica it has, of how many
    place: int
    places: int
    machine: WorkerMachine
    #: the model's state; garbage while it is being written, and not `whole`
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
    """What the processes of one run have in common. It knows none of them but by what `Peer` says."""

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
        #: what a coordinator writes may take until then
        self.store_slow_until = START
        #: how far the clock of the coordinator's machine is off, and has ever been
        self.clock_off_s, self.clocks_off_s = 0.0, [0.0]
        #: so many warm-ups are still to fail
        self.cold_warm_ups = plan.cold_warm_ups
        #: its user wants the job to end
        self.interrupted = False
        self.story: deque[tuple[Any, ...]] | None = deque(maxlen=20000) if keep_trace else None
        self._workers: dict[str, Peer] = {}
        self._groups: dict[tuple[int, int], Group] = {}
        self._troubles: dict[str, Troubles] = {}
        self._counter = 0

    def trace(self, *what: Any) -> None:
        """Keep a line of the story, where it is wanted."""
        if self.story is not None:
            self.story.append((round(self.timeline.now - START, 4), *what))

    # ---- time ----

    def jump(self, seconds: float) -> None:
        """Set the clock of the coordinator's machine; a coordinator that runs has read it before."""
        self.clock_off_s += seconds
        self.clocks_off_s.append(self.clock_off_s)

    def shows(self, time: float) -> bool:
        """Tell whether some coordinator's clock may have shown a time by now."""
        off = self.clocks_off_s
        return START + min(off) <= time <= self.timeline.now + max(off)

    def after(self, span: str, process: Delivers, action: Callable[..., object], *args: Any) -> None:
        """Let something happen in a process after a time that is drawn from `timing`."""
        self.timeline.after(self.rng.uniform(*self.timing.spans[span]), process.deliver, action, *args)

    def after_work(
        self, step: int, micro_batch: int, process: Delivers, node: str, action: Callable[..., object], *args: Any
    ) -> None:
        """The same once a node has computed a micro-batch, which takes what the plan says."""
        took_s = self.rng.uniform(*self.timing.spans["micro_batch"]) + self.plan.longer_s(step, micro_batch)
        took_s *= self.troubles(node).longer(self.timeline.now)
        self.timeline.after(took_s, process.deliver, action, *args)

    def after_disk(self, span: str, process: Delivers, node: str, action: Callable[..., object], *args: Any) -> None:
        """The same for what goes to a node's disk."""
        delay, slow_s = self.rng.uniform(*self.timing.spans[span]), self.troubles(node).slow_until - self.timeline.now
        self.timeline.after(max(delay, slow_s), process.deliver, action, *args)

    def store_delay(self) -> float:
        """Return how long a write to the store takes, in seconds; 0 for at once."""
        slow_s = self.store_slow_until - self.timeline.now
        return self.rng.uniform(0.0, slow_s) if slow_s > 0 else 0.0

    # ---- names and values ----

    def nonce(self) -> str:
        """Return a name that no other process has."""
        return f"{self.pid():08x}"

    def pid(self) -> int:
        """Return a process id that no other process has."""
        self._counter += 1
        return self._counter

    def garbage(self) -> int:
        """Return a value that is nowhere else."""
        return -self.pid()

    # ---- nodes and workers ----

    def troubles(self, node: str) -> Troubles:
        """Return what is wrong with a node, alive or not."""
        return self._troubles.setdefault(node, Troubles())

    def memory(self, node: str) -> NodeMemory:
        """Return what a node has of snapshots."""
        return self._memories.setdefault(node, NodeMemory())

    def add_worker(self, worker: Peer) -> None:
        """Note a worker process."""
        self._workers[worker.id] = worker

    def worker(self, name: str) -> Peer | None:
        """Return a living worker process (perhaps stopped), None where it is dead."""
        worker = self._workers.get(name)
        return worker if worker is not None and worker.alive else None

    def reaches(self, worker: str, peer: str) -> bool:
        """Tell whether data can pass between two workers."""
        return self.data_plane.reaches(node_of(worker), {node_of(peer)})

    def cut_off(self, node: str, nodes: AbstractSet[str]) -> AbstractSet[str]:
        """Return those nodes that another one does not reach."""
        plane = self.data_plane
        blocked = {other for other in nodes if plane.blocked(node, other)} if plane.one_way else set[str]()
        if plane.reaches(node, nodes):
            return blocked
        return blocked | {other for other in nodes if not plane.reaches(node, {other})}

    def group(self, plan: GenerationPlan) -> Group:
        """Return the group of a generation, the same for all its members."""
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
    """Return a coordinator's configuration with times that suit the simulation's."""
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
