"""Fault plans, which declare all faults of a run in advance. A seed always gives the same plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Literal

from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.layout_list import Layouts, ListedLayout
from tests.simulation.faults.troubles import SLOWER


class FaultKind(StrEnum):
    """The kinds of faults."""

    KILL_NODE = "kill_node"  # the coordinator sees a connection reset at once
    SILENT_NODE = "silent_node"  # the node ends without a message or a reset
    STOP_NODE = "stop_node"  # SIGSTOP ... SIGCONT
    KILL_WORKER = "kill_worker"
    STOP_WORKER = "stop_worker"
    RAISE_APPLY = "raise_apply"
    CUT = "cut"  # agent and coordinator lose their connection; both live
    GLITCH = "glitch"  # a collective fails although all processes live
    CRASH_COORDINATOR = "crash_coordinator"  # down for the duration
    PAUSE_COORDINATOR = "pause_coordinator"
    KILL_WITNESSES = "kill_witnesses"  # all nodes with witnesses, one after the other within the duration
    SUPERSEDE = "supersede"  # the coordinator is paused and replaced, and continues later
    JOIN = "join"
    RETURN = "return"  # a lost node returns with its name
    DAMAGE = "damage"  # the newest checkpoint is cut short
    LAG_LISTENER = "lag_listener"  # the listener threads of a node's workers get their orders late
    LAG_UP = "lag_up"  # messages from a node arrive late
    LAG_DOWN = "lag_down"  # messages to a node arrive late
    PARTITION = "partition"  # a node's data plane is cut off from all others, or from one, for the duration
    PARTITION_FOR_GOOD = "partition_for_good"
    HANG = "hang"  # a training thread hangs, and is reported as a failure after the duration
    # the coordinator's machine loses power and all data that is not on disk, for the duration
    POWER_CUT = "power_cut"
    OLD_STORE = "old_store"  # the store is replaced with a backup, and with its newest version after the duration
    SLOW_DISK = "slow_disk"  # writes of a node's checkpoints take until the end of the duration
    FULL_DISK = "full_disk"  # a node's checkpoints cannot be written
    SLOW_STORE = "slow_store"  # the coordinator's writes are slow, at most until the end of the duration
    # a worker's sums have a gradient twice, lack it, or have one of another micro-batch or step in its place
    CORRUPT_SUM = "corrupt_sum"
    INTERRUPT = "interrupt"  # a user interrupts the job, which saves its progress and ends
    UNDRAIN = "undrain"  # a user readmits a quarantined or drained node and restarts its agent
    DRAIN = "drain"  # a user drains a node
    NOTICE = "notice"  # a node's agent is told to end within a grace period
    MOVE = "move"  # a user asks a node to give its ranks to a standby and to become one
    CLOCK_JUMP = "clock_jump"  # the wall clocks of a node and of the coordinator's machine jump
    LINK_DOWN = "link_down"  # no data gets in or out of a node, for the duration
    CORRUPT_STATE = "corrupt_state"  # a worker's state is wrong from the next step that it applies
    DIFFER = "differ"  # a worker's script sets other options of the optimizer than all other workers
    KILL_WORKERS = "kill_workers"  # all workers of all nodes at once; their agents live
    FLIP = "flip"  # a bit flips in the parts of snapshots that a node holds
    FULL_MEMORY = "full_memory"  # a node has no room for parts of snapshots
    RAISE = "raise"  # a script raises at the next micro-batch that it computes
    SLOW_NODE = "slow_node"  # a node computes up to twice as long, for the duration
    JOIN_UNREACHABLE = "join_unreachable"  # a new node joins to which no other can ever connect
    BAD_SENDER = "bad_sender"  # a node cannot connect to any other, for the duration
    ONE_WAY = "one_way"  # a node cannot connect to one other, for the duration


class Raises(StrEnum):
    """The work at which every script raises."""

    NOTHING = "nothing"
    SAMPLE = "sample"  # a micro-batch of a step
    STEP = "step"  # any micro-batch of a step
    APPLY = "apply"  # a step's optimizer
    BEFORE = "before"  # the code before the loop
    UNDER = "under"  # a layout of `raises_at[0]` local ranks; `raises_at[1]`: before it attaches, after, or it dies


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault. It strikes at `time`, or when a worker reaches `boundary` in `step`."""

    kind: FaultKind
    #: seconds from the start
    time: float = 0.0
    #: chooses the node, modulo the number of nodes
    target: int = 0
    #: seconds
    duration: float = 0.0
    boundary: str = ""
    #: 0: any step
    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """A job and all its faults."""

    seed: int
    nodes: int = 3
    #: the number of nodes with which the job starts
    start_nodes: int = 3
    workers_per_node: int = 1
    steps: int = 5
    micro_batches: int = 6
    micro_batch: int = 4
    #: steps; 0: no checkpoints
    checkpoint_every: int = 0
    #: the coordinator chooses when to save checkpoints, if the job keeps them
    saves_in_time: bool = False
    #: the world is a multiple of it, and other nodes wait; 0: no such rule
    ep_size: int = 0
    #: every change restarts all workers
    restart: bool = False
    #: the first nodes join within this many seconds
    start_spread: float = 0.05
    #: experts per MoE layer; 0: a dense model
    experts: int = 0
    #: room for experts per layer and node; 0: room for all
    slots: int = 0
    #: steps between two placements of the experts
    rebalance_every: int = 0
    faults: tuple[Fault, ...] = ()
    #: the coordinator dies before these writes (records, events and messages count; 1-based)
    crashes: tuple[int, ...] = ()
    #: the same, counted from the first fault on
    crashes_after_strike: tuple[int, ...] = ()
    #: how long no coordinator runs after these crashes
    crash_down_s: float = 0.2
    #: in these crashes, the coordinator's machine loses power as well
    power_cuts: bool = False
    #: all scripts leave their loops (`break`) after the last step, and end
    leaves: bool = False
    #: the step at which one script asks all workers to stop; 0: none
    stops_at: int = 0
    #: the fan-out of hierarchical collectives; 0: flat collectives
    fan_out: int = 0
    #: how many workers report each step that passes; 0: as many as in a real job
    witnesses: int = 1
    #: the ranks of ended processes are held for their successors
    hold: bool = False
    #: restarts of a node within a window
    max_restarts: int = 100
    #: the work at which scripts raise, on every node and in every attempt
    raises: Raises = Raises.NOTHING
    #: the step and the micro-batch of that work; see also `Raises.UNDER`
    raises_at: tuple[int, int] = (0, 0)
    #: each (step, micro-batch) that is slow on every node
    slow_work: tuple[tuple[int, int], ...] = ()
    #: the extra time of each of them
    slow_work_s: float = 0.0
    #: the extra time of every micro-batch
    work_s: float = 0.0
    #: how the job handles slow nodes
    stragglers: Literal["ask", "move", "off"] = "ask"
    #: scripts log values in every step
    logs: bool = False
    #: workers report FLOP counts if their plan asks for them
    counts_flop: bool = False
    #: steps; 0: no snapshots
    snapshot_every: int = 0
    #: copies of each snapshot part and of each expert, on different nodes
    copies: int = 2
    #: nodes in addition to `nodes`, which wait to replace others
    standbys: int = 0
    #: the job runs in a pool
    pooled: bool = False
    #: when the pool calls a standby to join, in seconds
    calls: tuple[float, ...] = ()
    #: when the pool recalls a node, in seconds
    recalls: tuple[float, ...] = ()
    #: this many warm-ups fail, the first ones of the run
    cold_warm_ups: int = 0
    #: how the job reacts to a lost node; `restart` takes precedence
    on_loss: Literal["auto", "standby", "shrink", "wait"] = "auto"
    #: how many workers of a node share one replica; 1: each has a whole one
    places: int = 1
    #: (fewest nodes, places) of each layout, if the layout may change
    layouts: tuple[tuple[int, int], ...] = ()
    #: the script gives the node counts of `layouts`; otherwise holdfast chooses the faster layout
    told: bool = True
    #: from this step on no gradient is finite; 0: never
    skips_from: int = 0
    #: the job fails after this many skipped steps in a row; 0: never
    max_skipped: int = 0
    #: nodes are probed before they are admitted, or before the job begins
    probes: bool = False
    #: (sender, receiver): node numbers between which connections fail from the start; -1: all other nodes
    blocked: tuple[tuple[int, int], ...] = ()
    #: the coordinator's processor time for one received message, and for one sent message
    handle_s: float = 0.0
    send_s: float = 0.0

    @property
    def layout(self) -> Layout:
        """How a replica spans the workers of a node, if that does not change."""
        return layout_of(self.places)

    @property
    def listed(self) -> Layouts:
        """All layouts, if the layout may change."""
        return tuple(ListedLayout(layout=layout_of(each), nodes=nodes * self.told) for nodes, each in self.layouts)

    @property
    def nodes_for_experts(self) -> int:
        """How many nodes have room for all experts."""
        return -(-self.experts // self.slots) if self.slots else 1

    @property
    def bad_at_start(self) -> frozenset[str]:
        """The nodes that no other can connect to, or that can connect to no other, from the start."""
        return frozenset(f"n{max(link)}" for link in self.blocked if -1 in link)

    def longer_s(self, step: int, micro_batch: int) -> float:
        """Return the extra time of a micro-batch of a step, in seconds."""
        return self.work_s + (self.slow_work_s if (step, micro_batch) in self.slow_work else 0.0)

    @property
    def longer_alone_s(self) -> float:
        """The most extra time of a step, in seconds, if a slow node computes all of it."""
        return self.micro_batches * max(SLOWER) * self.work_s + len(self.slow_work) * self.slow_work_s

    @property
    def last_step(self) -> int:
        """The last step that can be committed."""
        return min(self.steps, self.skips_from + self.max_skipped - 1) if self.fails_by_skips else self.steps

    @property
    def fails_by_skips(self) -> bool:
        """Whether too many steps in a row are skipped, if the job gets that far."""
        return 0 < self.skips_from <= self.steps - self.max_skipped + 1 and self.max_skipped > 0

    def wants_the_end(self, step: int, rank: int, world: int) -> bool:
        """Return whether the script of this rank asks all workers to stop after this step. One rank asks per step."""
        return 0 < self.stops_at <= step and rank == step % world

    def fails_under(self, places: int) -> int | None:
        """Return how all scripts fail with this many local ranks, or None if they do not fail.

        0: they raise before they attach; 1: after that; 2: they die.
        """
        return self.raises_at[1] if self.raises is Raises.UNDER and self.raises_at[0] == places else None

    def raises_in(self, step: int, micro_batch: int | None) -> bool:
        """Return whether every script raises when it computes this micro-batch; None: when it applies the step."""
        if self.raises_at[0] != step or self.raises in (Raises.NOTHING, Raises.UNDER):
            return False
        if micro_batch is None or self.raises is Raises.APPLY:
            return micro_batch is None and self.raises is Raises.APPLY
        return self.raises is Raises.STEP or micro_batch == self.raises_at[1]

    def __str__(self) -> str:
        """Return all fields, one fault per line."""
        head = repr(replace(self, faults=()))
        return "\n  ".join([head, *(repr(fault) for fault in self.faults)])


def layout_of(places: int) -> Layout:
    """Return how a replica spans this many workers of a node."""
    return Layout(shard=2, tensor=places // 2) if places > 1 else WHOLE


#: the boundaries at which a worker can be struck, in the order of a step
STEP_BOUNDARIES = ("computing", "reducing", "reduced", "voted", "passed", "applying", "applied")
OTHER_BOUNDARIES = ("attach", "begun", "built", "entering", "entered", "stopped", "receiving", "sending", "finishing")
#: the boundaries that the training thread reaches
THREAD_BOUNDARIES = frozenset(
    (*STEP_BOUNDARIES, "putting", "proposing", "climbing", "entering", "entered", "moving", "finishing")
)

_RANDOM_KINDS = (
    (FaultKind.KILL_NODE, 6),
    (FaultKind.SILENT_NODE, 3),
    (FaultKind.STOP_NODE, 5),
    (FaultKind.KILL_WORKER, 5),
    (FaultKind.STOP_WORKER, 3),
    (FaultKind.RAISE_APPLY, 2),
    (FaultKind.CUT, 4),
    (FaultKind.GLITCH, 2),
    (FaultKind.CRASH_COORDINATOR, 4),
    (FaultKind.PAUSE_COORDINATOR, 3),
    (FaultKind.SUPERSEDE, 2),
    (FaultKind.JOIN, 6),
    (FaultKind.RETURN, 4),
    (FaultKind.DAMAGE, 1),
)
_KINDS = [kind for kind, weight in _RANDOM_KINDS for _ in range(weight)]
_AT_BOUNDARY = (
    FaultKind.KILL_NODE,
    FaultKind.SILENT_NODE,
    FaultKind.STOP_NODE,
    FaultKind.KILL_WORKER,
    FaultKind.STOP_WORKER,
    FaultKind.CUT,
    FaultKind.CRASH_COORDINATOR,
)
#: the share of the plans with experts, and the share with logged values
_WITH_EXPERTS = 0.15
_LOGS = 0.25
#: the share of the schedules in which time determines when checkpoints are due
_IN_TIME = 0.3
_SIZES = (1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 5, 5, 6, 8, 12, 16)


def random_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed: up to 16 nodes, single faults and storms."""
    rng = Random(seed)
    nodes = rng.choice(_SIZES)
    steps = rng.randint(3, 10 if nodes <= 6 else 6)
    span = 0.15 * steps + 0.3
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 6))):
        faults += _random_faults(rng, nodes, steps, rng.uniform(0.0, span))
    # A separate generator keeps the dense schedules unchanged.
    apart = Random(seed + 1_000_003)
    experts = apart.randint(2, 5) if apart.random() < _WITH_EXPERTS else 0
    crashes = tuple(sorted(rng.randint(1, 40 * nodes) for _ in range(rng.choice((0, 0, 0, 1, 1, 2)))))
    return FaultPlan(
        seed=seed,
        nodes=nodes,
        start_nodes=rng.randint(1, nodes),
        workers_per_node=1 if nodes > 4 else rng.choice((1, 1, 1, 2)),
        steps=steps,
        micro_batches=rng.randint(1, 10),
        checkpoint_every=rng.choice((0, 0, 1, 2, 3)),
        start_spread=rng.choice((0.0, 0.05, 1.0)),
        experts=experts,
        rebalance_every=apart.randint(1, 3) if experts else 0,
        faults=tuple(faults),
        crashes=crashes,
        crash_down_s=rng.choice((0.01, 0.2, 1.5)),
        witnesses=Random(seed + 2_000_003).choice((1, 1, 1, 2, 0)),
        logs=Random(seed + 3_000_017).random() < _LOGS,
        saves_in_time=Random(seed + 4_000_037).random() < _IN_TIME,
    )


#: further kinds, with their weights
_WIDE_KINDS = (
    (FaultKind.LAG_LISTENER, 4),
    (FaultKind.LAG_UP, 3),
    (FaultKind.LAG_DOWN, 3),
    (FaultKind.PARTITION, 4),
    (FaultKind.HANG, 4),
    (FaultKind.POWER_CUT, 3),
    (FaultKind.RAISE_APPLY, 1),
    (FaultKind.SLOW_DISK, 2),
    (FaultKind.FULL_DISK, 2),
)


def lively_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with a permanent last fault.

    It is a partition, or a hang that is reported in the end. The job must continue without the affected nodes, or end
    with a reason.
    """
    plan, rng = random_plan(seed), Random(seed * 41 + 3)
    nodes = max(2, plan.nodes)
    last = Fault(
        kind=rng.choice((FaultKind.PARTITION_FOR_GOOD, FaultKind.PARTITION_FOR_GOOD, FaultKind.HANG)),
        time=rng.uniform(0.0, 0.15 * plan.steps + 0.3),
        target=rng.randrange(64),
        duration=rng.choice((0.02, 0.5, 2.0)),
        boundary=rng.choice((*STEP_BOUNDARIES, *OTHER_BOUNDARIES, "moving")) if rng.random() < 0.7 else "",
    )
    kept = plan.faults[: rng.choice((0, 0, 1, 2))]
    return replace(plan, nodes=nodes, start_nodes=rng.randint(1, nodes), faults=(*kept, last))


def wide_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed with further kinds of faults, in addition to the kinds of `random_plan`."""
    plan, rng = random_plan(seed), Random(seed * 37 + 5)
    kinds = [kind for kind, weight in _WIDE_KINDS for _ in range(weight)]
    more = tuple(
        Fault(
            kind=rng.choice(kinds),
            time=rng.uniform(0.0, 0.15 * plan.steps + 0.3),
            target=rng.randrange(64),
            duration=rng.choice((0.02, 0.3, 0.8, 1.5, 3.0, 6.0)),
            boundary=rng.choice((*STEP_BOUNDARIES, *OTHER_BOUNDARIES, "moving")) if rng.random() < 0.5 else "",
        )
        for _ in range(rng.choice((1, 1, 2, 3)))
    )
    kept = rng.randint(0, len(plan.faults))
    if plan.experts:  # experts move seldom, so strike while they move
        kind = rng.choice((*_AT_BOUNDARY, FaultKind.RAISE_APPLY, FaultKind.GLITCH, *kinds))
        more += (Fault(kind=kind, target=rng.randrange(64), duration=0.7, boundary="moving"),)
    plan = replace(plan, faults=(*plan.faults[:kept], *more), checkpoint_every=rng.choice((0, 1, 1, 2, 3)))
    if not plan.experts or rng.random() < 0.4:
        return plan
    # One node alone may have too little room: the survivors may have to wait for others.
    plan = replace(plan, slots=rng.randint(max(1, plan.experts // 2), plan.experts))
    nodes, least = max(plan.nodes, plan.nodes_for_experts), plan.nodes_for_experts
    return replace(plan, nodes=nodes, start_nodes=max(plan.start_nodes, least))


def power_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which coordinators lose power with their machine. Only data on disk survives."""
    plan, rng = random_plan(seed), Random(seed * 43 + 9)
    last = max(plan.crashes, default=0)
    return replace(plan, crashes=(*plan.crashes, last + rng.randint(1, 40 * plan.nodes)), power_cuts=True)


def slow_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which the store is slow at times while other faults strike."""
    rng = Random(seed * 53 + 13)
    plan = rng.choice((random_plan, wide_plan, power_plan, baseline_plan))(seed)
    span = 0.15 * plan.steps + 0.3
    slow = tuple(
        Fault(
            kind=FaultKind.SLOW_STORE,
            time=rng.choice((0.0, rng.uniform(0.0, span))),
            duration=rng.choice((0.02, 0.3, 1.5, 4.0, 8.0)),
        )
        for _ in range(rng.choice((1, 2, 4)))
    )
    # The coordinator dies while a write is in progress.
    ends = (FaultKind.CRASH_COORDINATOR, FaultKind.SUPERSEDE, FaultKind.POWER_CUT)
    dies = tuple(
        Fault(kind=rng.choice(ends), time=fault.time + rng.random() * fault.duration, duration=rng.choice((0.01, 0.5)))
        for fault in slow
        if rng.random() < 0.5
    )
    return replace(plan, faults=(*plan.faults, *slow, *dies))


def interrupted_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed in which a user interrupts the job with Ctrl-C, repeatedly until it ends."""
    rng = Random(seed * 47 + 11)
    plan = rng.choice((random_plan, wide_plan, baseline_plan))(seed)
    wish = Fault(kind=FaultKind.INTERRUPT, time=rng.uniform(0.0, 0.15 * plan.steps + 0.3))
    return replace(plan, faults=(*plan.faults, wish), checkpoint_every=rng.choice((0, 1, 2, 3)))


def baseline_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed for the policies of other systems: world sizes in multiples, restarts, or both."""
    plan = random_plan(seed)
    rng = Random(seed * 31 + 7)
    ep_size = rng.choice((0, 1, 2, 2, 3, 4))
    return replace(
        plan,
        nodes=max(plan.nodes, ep_size),
        start_nodes=max(plan.start_nodes, ep_size),
        workers_per_node=1 if ep_size else plan.workers_per_node,
        ep_size=ep_size,
        experts=0,
        restart=ep_size == 0 or rng.random() < 0.5,
    )


def _random_faults(rng: Random, nodes: int, steps: int, time: float) -> list[Fault]:
    """Return one fault, or a storm of them within a tenth of a second."""
    out: list[Fault] = []
    for _ in range(rng.choice((1, 1, 1, 2, nodes + 1))):
        kind = rng.choice(_KINDS)
        boundary = ""
        if kind in _AT_BOUNDARY and rng.random() < 0.5:
            boundary = rng.choice(STEP_BOUNDARIES + OTHER_BOUNDARIES)
        out.append(
            Fault(
                kind=kind,
                time=time + rng.uniform(0.0, 0.1),
                target=rng.randrange(64),
                duration=rng.choice((0.02, 0.2, 0.7, 1.5, 4.0)),
                boundary=boundary,
                step=rng.randint(0, steps) if boundary in STEP_BOUNDARIES else 0,
            )
        )
        if len(out) == 8:
            break
    return out
