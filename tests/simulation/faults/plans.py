"""Fault plans: what goes wrong, when or where, declared before the run; a seed gives the same plan for ever."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Literal

from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.several import Layouts, ListedLayout
from tests.simulation.faults.troubles import SLOWER


class FaultKind(StrEnum):
    """What can go wrong. A pause has a duration; `target` counts living nodes, modulo."""

    KILL_NODE = "kill_node"  # the coordinator sees a reset at once
    SILENT_NODE = "silent_node"  # gone without a word
    STOP_NODE = "stop_node"  # SIGSTOP ... SIGCONT
    KILL_WORKER = "kill_worker"
    STOP_WORKER = "stop_worker"
    RAISE_APPLY = "raise_apply"
    CUT = "cut"  # agent and coordinator lose each other, both live
    GLITCH = "glitch"  # a collective fails although all processes live
    CRASH_COORDINATOR = "crash_coordinator"  # down for the duration
    PAUSE_COORDINATOR = "pause_coordinator"
    KILL_WITNESSES = "kill_witnesses"  # all nodes with witnesses, one after the other within the duration
    SUPERSEDE = "supersede"  # paused, replaced, and waking up
    JOIN = "join"
    RETURN = "return"  # a node that is gone comes back under its name
    DAMAGE = "damage"  # the newest checkpoint is cut short
    LAG_LISTENER = "lag_listener"  # the listener threads of a node's workers get their orders late
    LAG_UP = "lag_up"  # messages from a node arrive late
    LAG_DOWN = "lag_down"  # messages to a node arrive late
    PARTITION = "partition"  # a node's data plane is apart from all others, or from one, and heals
    PARTITION_FOR_GOOD = "partition_for_good"
    HANG = "hang"  # a training thread hangs; told as a failure after the duration
    # the coordinator's machine loses power and all data that is not on disk, for the duration
    POWER_CUT = "power_cut"
    OLD_STORE = "old_store"  # the store is put back to a backup, and to the newest after the duration
    SLOW_DISK = "slow_disk"  # writing and renaming a node's checkpoints takes until the end of the duration
    FULL_DISK = "full_disk"  # a node's checkpoints cannot be written
    SLOW_STORE = "slow_store"  # the coordinator's writes are slow, at most until the end of the duration
    CORRUPT_SUM = "corrupt_sum"  # a gradient is in a worker's sums twice, or not, or is another's, or of a step before
    INTERRUPT = "interrupt"  # the job's user wants it to end, saved
    UNDRAIN = "undrain"  # a user readmits a quarantined or drained node and restarts its agent
    DRAIN = "drain"  # a user drains a node
    NOTICE = "notice"  # a node's agent is told to end within a grace period
    MOVE = "move"  # a user asks a node to give its ranks to a standby and to become one
    CLOCK_JUMP = "clock_jump"  # a node shows another time; and the coordinator's machine, as the next ones will see
    LINK_DOWN = "link_down"  # nothing gets in or out of a node, until the end of the duration
    CORRUPT_STATE = "corrupt_state"  # a worker's state is another from the next step on that it applies
    DIFFER = "differ"  # a worker's script sets options of the optimizer that no other worker has
    KILL_WORKERS = "kill_workers"  # all workers of all nodes at once; their agents live
    FLIP = "flip"  # a bit flips in the parts of snapshots that a node holds
    FULL_MEMORY = "full_memory"  # a node has no room for parts of snapshots
    RAISE = "raise"  # a script raises at the next micro-batch that it computes
    SLOW_NODE = "slow_node"  # a node computes up to twice as long, until the end of the duration
    JOIN_UNREACHABLE = "join_unreachable"  # a new node comes to which no other can connect, permanently
    BAD_SENDER = "bad_sender"  # a node cannot connect to any other, for the duration
    ONE_WAY = "one_way"  # a node cannot connect to one other, for the duration


class Raises(StrEnum):
    """What every script raises at, whichever it is."""

    NOTHING = "nothing"
    SAMPLE = "sample"  # a micro-batch of a step
    STEP = "step"  # any micro-batch of a step
    APPLY = "apply"  # a step's optimizer
    BEFORE = "before"  # the code before the loop
    UNDER = "under"  # a layout of `raises_at[0]` local ranks; `raises_at[1]`: before it attaches, after, or it dies


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault: at a time, or when a worker of `node` is at a boundary of a step (0: of any step).

    `target` chooses the node, `duration` is in seconds.
    """

    kind: FaultKind
    time: float = 0.0
    target: int = 0
    duration: float = 0.0
    boundary: str = ""
    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """A job and all that goes wrong in it.

    crashes: the coordinator dies before its n-th writes (records, events and messages count; 1-based).
    With `power_cuts`, its machine dies too.
    crashes_after_strike: the same, counted from the first fault on.
    ep_size: the world is a multiple of it, and other nodes wait; 0: no such rule.
    restart: every change restarts all workers.
    experts: per MoE layer, 0 for a dense model. slots: for experts, per layer and node, 0 for room for all.
    rebalance_every: steps.
    leaves: all scripts leave their loops (`break`) after the last step, and end.
    stops_at: the step at which one script asks all workers to stop, 0 for none.
    fan_out: of hierarchical collectives; 0 for flat ones.
    witnesses: how many workers report each step that passes; 0: as many as in a real job.
    hold: the ranks of ended processes are held for their successors. max_restarts: of a node, within a window.
    raises, raises_at: at which (step, micro-batch) scripts always raise, on every node.
    slow_work, slow_work_s: which (step, micro-batch) are slow on every node, and the extra time that each takes.
    work_s: the extra time of every micro-batch. stragglers: how the job handles slow nodes.
    logs: scripts log values in every step. counts_flop: workers report FLOP counts if their plan asks for them.
    snapshot_every: steps, 0 for no snapshots; copies: of each part and each expert, on different nodes.
    saves_in_time: the coordinator chooses when to save checkpoints, if the job keeps them.
    standbys: nodes in addition to `nodes`, which wait to replace others.
    cold_warm_ups: how many of their first warm-ups fail.
    on_loss: how the job reacts to a lost node, unless every change restarts all workers (`restart`).
    pooled: the job runs in a pool; recalls: when the pool recalls a node, in seconds;
    calls: when it calls a standby to join.
    places: the workers of a node that share one replica; 1: each has a whole one.
    layouts: (fewest nodes, places), if the layout changes;
    told: the script fixes the layouts, otherwise the faster one is used.
    skips_from: from this step on no gradient is finite; 0: never. max_skipped: after this many the job fails.
    probes: nodes are probed before they are admitted, or begin. blocked: from the start, connections from one node to
    another fail, permanently, by their numbers; -1 stands for all other nodes.
    handle_s, send_s: the coordinator's processor time for one received message, and for one sent message.
    """

    seed: int
    nodes: int = 3
    start_nodes: int = 3
    workers_per_node: int = 1
    steps: int = 5
    micro_batches: int = 6
    micro_batch: int = 4
    checkpoint_every: int = 0
    saves_in_time: bool = False
    ep_size: int = 0
    restart: bool = False
    start_spread: float = 0.05
    experts: int = 0
    slots: int = 0
    rebalance_every: int = 0
    faults: tuple[Fault, ...] = ()
    crashes: tuple[int, ...] = ()
    crashes_after_strike: tuple[int, ...] = ()
    crash_down_s: float = 0.2
    power_cuts: bool = False
    leaves: bool = False
    stops_at: int = 0
    fan_out: int = 0
    witnesses: int = 1
    hold: bool = False
    max_restarts: int = 100
    raises: Raises = Raises.NOTHING
    raises_at: tuple[int, int] = (0, 0)
    slow_work: tuple[tuple[int, int], ...] = ()
    slow_work_s: float = 0.0
    work_s: float = 0.0
    stragglers: Literal["ask", "move", "off"] = "ask"
    logs: bool = False
    counts_flop: bool = False
    snapshot_every: int = 0
    copies: int = 2
    standbys: int = 0
    pooled: bool = False
    calls: tuple[float, ...] = ()
    recalls: tuple[float, ...] = ()
    cold_warm_ups: int = 0
    on_loss: Literal["auto", "standby", "shrink", "wait"] = "auto"
    places: int = 1
    layouts: tuple[tuple[int, int], ...] = ()
    told: bool = True
    skips_from: int = 0
    max_skipped: int = 0
    probes: bool = False
    blocked: tuple[tuple[int, int], ...] = ()
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
        """Return by how much a micro-batch of a step takes longer than others, in seconds."""
        return self.work_s + (self.slow_work_s if (step, micro_batch) in self.slow_work else 0.0)

    @property
    def longer_alone_s(self) -> float:
        """By how much a step takes longer than usual at most: a slow node computes all of it."""
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
        """Return how all scripts fail with this many local ranks:

        before they attach, after, or by dying. None: they do not fail.
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


#: Where a worker can be struck, in the order of a step.
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
#: the shares of the plans whose model has experts, and of those whose script logs values
_WITH_EXPERTS = 0.15
_LOGS = 0.25
#: share of the schedules in which it is time that says when checkpoints are due
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


#: kinds that came later, with their weights
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
    """Return the plan of a seed whose last fault is permanent.

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
    """Return the plan of a seed with further kinds of faults, in addition to those of `random_plan`."""
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
    if plan.experts:  # they seldom move: strike where they do
        kind = rng.choice((*_AT_BOUNDARY, FaultKind.RAISE_APPLY, FaultKind.GLITCH, *kinds))
        more += (Fault(kind=kind, target=rng.randrange(64), duration=0.7, boundary="moving"),)
    plan = replace(plan, faults=(*plan.faults[:kept], *more), checkpoint_every=rng.choice((0, 1, 1, 2, 3)))
    if not plan.experts or rng.random() < 0.4:
        return plan
    # A node alone has too little room: who is left may have to wait for others.
    plan = replace(plan, slots=rng.randint(max(1, plan.experts // 2), plan.experts))
    nodes, least = max(plan.nodes, plan.nodes_for_experts), plan.nodes_for_experts
    return replace(plan, nodes=nodes, start_nodes=max(plan.start_nodes, least))


def power_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed whose coordinators lose power with their machine. Only data on disk survives."""
    plan, rng = random_plan(seed), Random(seed * 43 + 9)
    last = max(plan.crashes, default=0)
    return replace(plan, crashes=(*plan.crashes, last + rng.randint(1, 40 * plan.nodes)), power_cuts=True)


def slow_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed whose store is slow at times while other faults strike."""
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
    # Let the coordinator die while a write is on its way.
    ends = (FaultKind.CRASH_COORDINATOR, FaultKind.SUPERSEDE, FaultKind.POWER_CUT)
    dies = tuple(
        Fault(kind=rng.choice(ends), time=fault.time + rng.random() * fault.duration, duration=rng.choice((0.01, 0.5)))
        for fault in slow
        if rng.random() < 0.5
    )
    return replace(plan, faults=(*plan.faults, *slow, *dies))


def interrupted_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed whose user interrupts the job with Ctrl-C, repeatedly until it ends."""
    rng = Random(seed * 47 + 11)
    plan = rng.choice((random_plan, wide_plan, baseline_plan))(seed)
    wish = Fault(kind=FaultKind.INTERRUPT, time=rng.uniform(0.0, 0.15 * plan.steps + 0.3))
    return replace(plan, faults=(*plan.faults, wish), checkpoint_every=rng.choice((0, 1, 2, 3)))


def baseline_plan(seed: int) -> FaultPlan:
    """Return the plan of a seed for the policies that others have: a world held to multiples, restarts, or both."""
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
