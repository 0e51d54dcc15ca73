"""The coordinator's record in the store: small, complete, and replaced as a whole by compare-and-swap."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.protocol.batch_summary import BatchSummary
from holdfast.protocol.events import AnyEvent
from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.layout_list import FailedLayout, LayoutChange, Layouts
from holdfast.protocol.names import Count, Struct
from holdfast.protocol.plan import Decision, ExpertShape, GenerationPlan, PassedStep
from holdfast.protocol.pool.grants import Held
from holdfast.protocol.position import Position
from holdfast.protocol.state import SnapshotSource

#: Raised whenever an older and a newer coordinator would misread each other's records.
#: 2: `position` and `passed` are required.
#: 3: events of format 2 in the outbox; the outcome is `finished`, not `done`.
#: 4: step results have the sum of the hashes of their micro-batches.
#: 5: step results have logged values.
#: 6: `layout`.
#: 7: `change`.
SCHEMA = 7
#: lineages that are kept; snapshots of older ones cannot be used
MAX_BASES = 8
#: The record is written as a whole, and etcd accepts 1.5 MB. So each list that members can add to is bounded.
#: Most evaluations with a known newest step.
MAX_EVALUATIONS = 256
#: Most quarantined nodes, and most nodes that are given up. The newest are kept.
MAX_LISTED = 512
#: Most drained nodes, and most standbys. The newest are kept.
MAX_NODES_KEPT = 2048
#: most characters of a reason, and of a place in a script
MAX_REASON = 300


class KnownCheckpoint(Struct, frozen=True, kw_only=True, tag="KnownCheckpoint"):
    """A checkpoint on the decided lineage."""

    step: int
    #: its folder in the checkpoint directory
    name: str
    #: term in which it was written, or 0 if an earlier version wrote it
    term: int = 0
    #: generation in which it was written, or 0
    generation: int = 0


class Saving(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Saving"):
    """The cost of checkpoints in this run, from which their period follows."""

    #: when the newest checkpoint was kept, unix seconds
    saved_at: float = 0.0
    #: mean seconds that a checkpoint has cost training
    cost_s: float = 0.0
    #: number of checkpoints in that mean
    saves: int = 0
    #: how often the job has gone back to a checkpoint, or lacked one
    losses: int = 0


class Refusal(Struct, frozen=True, kw_only=True, tag="Refusal"):
    """The result of an attempt at `step` was refused.

    Until the step is applied, each attempt begins without kept gradients.
    """

    step: int
    #: first generation that began without them; only refusals from there on count as another one
    clean_from: int


class RaisedBefore(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="RaisedBefore"):
    """An exception of the script."""

    worker: str
    #: type of the exception, with file and line
    place: str
    #: unix seconds
    time: float
    step: int | None = None
    micro_batch: int | None = None


class Quarantined(Struct, frozen=True, kw_only=True, tag="Quarantined"):
    """A node that may not return."""

    node: str
    #: No other node on this host may return either. "" if other nodes run there.
    host: str
    why: str
    #: unix seconds
    since: float


class GivenUp(Struct, frozen=True, kw_only=True, tag="GivenUp"):
    """A node without restarts left. It is quarantined once the others have committed `step` without it.

    If they do not, the failures were not its fault. The other fields are as in `Quarantined`.
    """

    node: str
    host: str
    why: str
    since: float
    step: int


class Departure(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Departure"):
    """A node that drains, or that was drained."""

    node: str
    #: when the drain was requested, unix seconds
    since: float
    #: whether it remains as a standby after a standby has taken its place
    stays: bool = False
    #: the standby that takes its place, or "" for any
    to: str = ""
    #: The standby that takes its place: it joins next to the node, or after it has left. "" if none does.
    beside: str = ""
    #: whether it leaves without a replacement
    closes: bool = False
    #: when the node ends in any case, unix seconds, or 0 if it has no limit
    until: float = 0.0
    #: Its workers, kept from the decision without them until their state is certainly no longer needed. Empty before
    #: that decision.
    owed: tuple[str, ...] = ()
    #: step of that decision
    step: int = 0


class SlowNode(Struct, frozen=True, kw_only=True, tag="SlowNode"):
    """A node that is slower than the others. It replaces no other node until its time is over."""

    node: str
    #: its time divided by that of the others
    factor: float
    #: unix seconds
    until: float


class Standby(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Standby"):
    """A node that was started as a standby."""

    node: str
    #: process of its agent
    agent_pid: int
    #: how often it was ordered to warm up
    tries: int = 0
    #: whether it is warm
    ready: bool = False
    #: whether it has become an ordinary node
    promoted: bool = False


class LastWill(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="LastWill"):
    """How the job ends once its state is saved."""

    why: str
    exit_code: int
    #: as in `job_finished`, if the job does not fail
    reason: str = "stopped"
    #: whether the job has failed; else it can be resumed
    failed: bool = False
    #: whether the job does not end, and all workers restart
    renew: bool = False
    traceback: str = ""


class Record(Struct, frozen=True, kw_only=True, tag="Record"):
    """The coordinator's durable state."""

    schema: int
    job: str
    term: int
    #: highest generation so far, including that of a pending plan
    generation: int = 0
    plan: GenerationPlan | None = None
    decision: Decision | None = None
    #: a plan with a group that is being built
    pending: GenerationPlan | None = None
    #: generation of the last START or ROLLBACK; steps of earlier generations do not count
    lineage: int = 0
    #: digest of the first worker's script
    script_digest: str = ""
    #: configuration of the first worker
    config: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    #: summary of the data that all workers of this run have
    data: BatchSummary = ()
    #: samples of a step
    global_batch: int = 0
    micro_batches: int = 0
    seed: int = 0
    #: a refused result of the step in progress
    refusal: Refusal | None = None
    expert_shape: ExpertShape | None = None
    #: the layout in force
    layout: Layout = WHOLE
    #: the layouts of the first worker
    layouts: Layouts = ()
    #: a change of the layout that is in progress
    change: LayoutChange | None = None
    #: seconds of a micro-batch under layouts that were in force, by their names
    layout_s: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    #: layouts that did not fit into memory
    too_large: tuple[Layout, ...] = ()
    #: layouts under which the script failed
    failed_layouts: tuple[FailedLayout, ...] = ()
    #: checkpoints to which the job can go back, oldest first
    checkpoints: tuple[KnownCheckpoint, ...] = ()
    #: names of checkpoints that may be removed
    superseded: tuple[str, ...] = ()
    saving: Saving = Saving()
    #: whether the workers have a checkpoint directory
    saves: bool = False
    #: whether the coordinator chooses when to write checkpoints
    saves_in_time: bool = False
    #: number of checkpoints that counted, until they could not be read
    unreadable: int = 0
    #: steps on which `decision` rests, and that were not in the journal when it was made
    passed: tuple[PassedStep, ...] = ()
    #: position of the job before the events in `outbox`
    position: Position = Position()
    #: Events of the transition that wrote this record. After a crash, the next coordinator appends the events that
    #: the journal lacks.
    outbox: tuple[AnyEvent, ...] = ()
    #: newest exceptions of the script, oldest first
    raised: tuple[RaisedBefore, ...] = ()
    #: newest step of each evaluation
    evaluated: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])
    #: set while the last plan is in force
    will: LastWill | None = None
    #: the step after which a script has asked to stop, with its result, until the job has stopped
    stopped: PassedStep | None = None
    #: when this run began, unix seconds
    run_since: float = 0.0
    #: when the first run began, unix seconds
    born: float = 0.0
    #: newest lineages, oldest first: the generation in which each began, and its first step
    bases: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_BASES)] = ()
    quarantined: tuple[Quarantined, ...] = ()
    given_up: tuple[GivenUp, ...] = ()
    #: nodes that drain
    leaving: tuple[Departure, ...] = ()
    #: nodes that were drained, and may not return unless a user allows it
    drained: tuple[Departure, ...] = ()
    #: standbys that have come; only the last of each name
    standbys: tuple[Standby, ...] = ()
    #: nodes that were replaced because they were slow, or would have been
    slow: tuple[SlowNode, ...] = ()
    #: Slow nodes without a replacement, with their time divided by that of the others. They get fewer micro-batches.
    relieved: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    #: most nodes that the job has had, without drained ones
    wanted: int = 0
    #: rack and zone of the members and of missing nodes, if they have any; the newest lost last
    places: Mapping[str, tuple[str, str]] = msgspec.field(default_factory=dict[str, tuple[str, str]])
    #: last measurements of starts, warm-ups and moves, by kind
    costs: Mapping[str, tuple[float, ...]] = msgspec.field(default_factory=dict[str, tuple[float, ...]])
    #: counted FLOP of training on a sample, or 0 before that
    flop_per_sample: float = 0.0
    #: the grants of the pool, or None outside of pools
    held: Held | None = None
    #: A random name that the job keeps forever. Agents report it, so that jobs with the same name are distinguished.
    identity: str = ""
    #: URL of the coordinator of this term; "" if an earlier version wrote this
    url: str = ""
    #: "", finished or failed
    outcome: str = ""  # "", finished, failed

    def replacements_among(self, nodes: Collection[str]) -> dict[str, str]:
        """Return the replacements among these nodes, each with the draining node among them that it replaces.

        Replacements that drain themselves are left out, and draining nodes that a decision has already removed.
        """
        going = {one.node for one in self.leaving}
        pairs = {one.beside: one.node for one in self.leaving if not one.owed}
        return {name: whose for name, whose in pairs.items() if {name, whose} <= {*nodes} and name not in going}

    @property
    def newest_event(self) -> int:
        """The number of the newest event in the record."""
        return self.outbox[-1].seq if self.outbox else self.position.seq

    @property
    def stashed_step(self) -> int:
        """The step of a state that exists only as a stash for another layout, or 0."""
        return self.change.kept[2] if self.change is not None and self.change.kept is not None else 0

    @property
    def stash_nodes(self) -> tuple[str, ...]:
        """The nodes that hold the stash of `stashed_step`; () if there is no stash."""
        source = self.decision.source if self.stashed_step and self.decision is not None else None
        return tuple(keeper.node for keeper in source.keepers) if isinstance(source, SnapshotSource) else ()
