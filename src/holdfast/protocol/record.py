"""What the coordinator keeps in the store: small, complete, replaced as a whole by compare-and-swap."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.protocol.batch_summary import BatchSummary
from holdfast.protocol.events import AnyEvent
from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.several import FailedLayout, LayoutChange, Layouts
from holdfast.protocol.names import Count, Struct
from holdfast.protocol.plan import Decision, ExpertShape, GenerationPlan, Passed
from holdfast.protocol.pool.held import Held
from holdfast.protocol.position import Position
from holdfast.protocol.state import SnapshotSource

#: Raised with every change after which a coordinator would misread what one of before wrote, or the other way round.
#: 2: `position` and `passed` count; a record without them says nothing of where the job stands.
#: 3: events of format 2 in the outbox; the outcome is `finished`, not `done`.
#: 4: v has the sum of its micro-batches' hashes.
#: 5: v has what the script has logged.
#: 6: `layout` says which workers are one replica.
#: 7: `change` says that another layout is on its way, and in which plan's memory the state lies.
SCHEMA = 7
#: lineages that are remembered: snapshots of older ones are of no use
MAX_BASES = 8
#: The record is written as a whole, and etcd takes 1.5 MB at a time. So every list that a member can add to is bounded:
#: evaluations whose newest step is known
MAX_EVALUATIONS = 256
#: nodes that are quarantined, and nodes that are given up: the newest of each
MAX_LISTED = 512
#: nodes that have left in good order, and standbys: the newest of each
MAX_NODES_KEPT = 2048
#: characters of a reason, and of a place in a script
MAX_REASON = 300


class KnownCheckpoint(Struct, frozen=True, kw_only=True, tag="KnownCheckpoint"):
    """A checkpoint on the decided lineage, under its final name in the checkpoint directory.

    `term` and `generation` are those in which it was written, 0 for one of an earlier version.
    """

    step: int
    name: str
    term: int = 0
    generation: int = 0


class Saving(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Saving"):
    """What is known of saving this job, in this run: from it follows how often that is done.

    `saved_at`: when the newest checkpoint was kept, unix seconds. `cost_s`: what `saves` of them have cost training, on
    the average. `losses`: how often the job has gone back to one, or lacked one.
    """

    saved_at: float = 0.0
    cost_s: float = 0.0
    saves: int = 0
    losses: int = 0


class Refusal(Struct, frozen=True, kw_only=True, tag="Refusal"):
    """v of an attempt at `step` was refused: until it is applied, every attempt begins with nothing held.

    `clean_from`: the first generation that has begun so. Only the refusal of an attempt from there on is another one.
    """

    step: int
    clean_from: int


class RaisedBefore(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="RaisedBefore"):
    """A script raised there: `place` is the exception's type with file and line, `time` unix seconds."""

    worker: str
    place: str
    time: float
    step: int | None = None
    micro_batch: int | None = None


class Quarantined(Struct, frozen=True, kw_only=True, tag="Quarantined"):
    """A node that may not come back, nor another on its `host` ("": others are there, too). `since`: unix seconds."""

    node: str
    host: str
    why: str
    since: float


class GivenUp(Struct, frozen=True, kw_only=True, tag="GivenUp"):
    """A node on which nothing is tried any more; it is quarantined once the others have committed `step` without it.

    If they never do, it was not the node's fault. `host`, `why`, `since` as in `Quarantined`.
    """

    node: str
    host: str
    why: str
    since: float
    step: int


class Departure(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Departure"):
    """A node that was asked to leave in good order, or that has left so. `since`: when it was asked, unix seconds.

    `stays`: it gives its place to a standby, and is one itself from then on; `to`: to this one ("": to any).
    `closes`: nobody takes its place: the job is to have one node fewer.
    `until`: it ends then, whatever the others do, unix seconds (0: it leaves when it can).
    `beside`: the standby that takes its place: it joins next to the node, or once the node has left ("": none does).
    `owed`: its workers, from the decision that does without them, which was for `step`, until it is proven that nobody
    needs anything of theirs any more.
    """

    node: str
    since: float
    stays: bool = False
    to: str = ""
    beside: str = ""
    closes: bool = False
    until: float = 0.0
    owed: tuple[str, ...] = ()
    step: int = 0


class SlowNode(Struct, frozen=True, kw_only=True, tag="SlowNode"):
    """A node that took `factor` times as long as the others: it takes nobody's place `until` then, in unix seconds."""

    node: str
    factor: float
    until: float


class Standby(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Standby"):
    """A node that was started as a standby, by its agent's process. `tries`: how often it was told to warm up.

    `ready`: warm, as far as was told. `promoted`: it is a node like any other from here on.
    """

    node: str
    agent_pid: int
    tries: int = 0
    ready: bool = False
    promoted: bool = False


class LastWill(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="LastWill"):
    """How the job is to end once what it has led to is saved: with this exit code, and cause.

    `reason`: as of `job_finished`, where it does not fail. `failed`: for good; else it can be taken up again.
    `renew`: it does not end, all workers are started again.
    """

    why: str
    exit_code: int
    reason: str = "stopped"
    failed: bool = False
    renew: bool = False
    traceback: str = ""


class Record(Struct, frozen=True, kw_only=True, tag="Record"):
    """The coordinator's durable state.

    `generation` is the highest number ever given, a pending plan's included. `lineage` is the generation of the last
    START or ROLLBACK: what was applied in earlier ones does not count. `passed`: steps that `decision` rests on and
    that were not in the journal when it was taken, with their v. `script_digest`, `config` and `layouts` are those of
    the first worker, `layout` is the one in force. `data`: a summary of the data that all workers of this run have.
    `change`: to another one. `layout_s`: what a micro-batch took under
    layouts that were in force, by their names. `too_large`: those that have not fitted memory. `failed_layouts`:
    those under which the script failed.
    `outbox` holds the events of the transition that wrote this record, `position` is where the job stood before them:
    what the journal lacks of either after a crash is appended at the restart. `seed`,
    `micro_batches` and `global_batch` say which samples a step has; `refusal` is of the step in progress.
    `checkpoints`, oldest first, are those that the job can go back to; those whose names are in `superseded` may be
    removed from the directory.
    `evaluated`: of each evaluation the newest step that was told.
    `raised`: the newest exceptions of the script, oldest first. `will`: given while the last plan is in force.
    `stopped`: the step after which a script has asked all to stop, with its v, until it is done without that.
    `run_since`: when this run was begun, unix seconds, whoever coordinates it now. `born`: when the first was.
    `leaving`: nodes that go once they are not needed; `drained`: those that have gone so, and may not come back by
    themselves. `standbys`: of those that have come, and have not been followed by another of their name.
    `slow`: those that were moved away, or would have been, because they were slow.
    `relieved`: nodes that are slow and that nobody can take the place of, by how many times as long as the others they
    take: they are given fewer micro-batches.
    `wanted`: how many nodes the job has had at the most, less those that were drained.
    `places`: rack and zone of the world's nodes and of those that it misses, if they named any; the newest lost last.
    `costs`: what was measured last of starts, warm-ups and moves, by what it is.
    `flop_per_sample`: that training on one takes, as it was counted; 0 before that.
    `held`: what it has of the pool that it runs in, None outside of pools.
    `bases`: the newest lineages, oldest first: the generation in which each began, and the step that it began with.
    """

    schema: int
    job: str
    term: int
    generation: int = 0
    plan: GenerationPlan | None = None
    decision: Decision | None = None
    pending: GenerationPlan | None = None
    lineage: int = 0
    script_digest: str = ""
    config: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    data: BatchSummary = ()
    global_batch: int = 0
    micro_batches: int = 0
    seed: int = 0
    refusal: Refusal | None = None
    expert_shape: ExpertShape | None = None
    layout: Layout = WHOLE
    layouts: Layouts = ()
    change: LayoutChange | None = None
    layout_s: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    too_large: tuple[Layout, ...] = ()
    failed_layouts: tuple[FailedLayout, ...] = ()
    checkpoints: tuple[KnownCheckpoint, ...] = ()
    superseded: tuple[str, ...] = ()
    saving: Saving = Saving()
    saves: bool = False  # the workers were given a directory for checkpoints
    saves_in_time: bool = False  # and nobody has said after how many steps
    unreadable: int = 0  # checkpoints that counted, until they could not be read
    passed: tuple[Passed, ...] = ()
    position: Position = Position()
    outbox: tuple[AnyEvent, ...] = ()
    raised: tuple[RaisedBefore, ...] = ()
    evaluated: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])
    will: LastWill | None = None
    stopped: Passed | None = None
    run_since: float = 0.0
    born: float = 0.0
    bases: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_BASES)] = ()
    quarantined: tuple[Quarantined, ...] = ()
    given_up: tuple[GivenUp, ...] = ()
    leaving: tuple[Departure, ...] = ()
    drained: tuple[Departure, ...] = ()
    standbys: tuple[Standby, ...] = ()
    slow: tuple[SlowNode, ...] = ()
    relieved: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    wanted: int = 0
    places: Mapping[str, tuple[str, str]] = msgspec.field(default_factory=dict[str, tuple[str, str]])
    costs: Mapping[str, tuple[float, ...]] = msgspec.field(default_factory=dict[str, tuple[float, ...]])
    flop_per_sample: float = 0.0
    held: Held | None = None
    #: A random name that the job keeps for life. Agents report it, so that jobs of the same name are told apart.
    identity: str = ""
    #: Where the coordinator of this term serves; "" if an earlier version wrote this.
    url: str = ""
    outcome: str = ""  # "", finished, failed

    def beside(self, nodes: Collection[str]) -> dict[str, str]:
        """Return which of these nodes are here for the places of others of them, that have not gone, with those."""
        going = {one.node for one in self.leaving}
        pairs = {one.beside: one.node for one in self.leaving if not one.owed}
        return {name: whose for name, whose in pairs.items() if {name, whose} <= {*nodes} and name not in going}

    @property
    def newest_event(self) -> int:
        """The number of the newest event that the record knows of."""
        return self.outbox[-1].seq if self.outbox else self.position.seq

    @property
    def in_memory(self) -> int:
        """The step whose state was put away for another layout, and is nowhere else yet; 0: there is none."""
        return self.change.kept[2] if self.change is not None and self.change.kept is not None else 0

    @property
    def in_memory_of(self) -> tuple[str, ...]:
        """The nodes that have put away what `in_memory` says: nobody else has it."""
        source = self.decision.source if self.in_memory and self.decision is not None else None
        return tuple(keeper.node for keeper in source.keepers) if isinstance(source, SnapshotSource) else ()
