"""What the pool and a job's coordinator tell each other: how things stand, by their records, never what has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast.protocol.job_spec import MOST_FLOP
from holdfast.protocol.layouts.several import Layouts
from holdfast.protocol.names import Count, Name, Seconds, Struct, Text

#: what a job is to do with its nodes: train; save its state and leave them; save it and end; end at once
PoolWish = Literal["run", "suspend", "stop", "stop_now"]
#: how a job stands by its own record; the last three: it is over
JobStanding = Literal["going", "suspended", "finished", "stopped", "failed"]


class JobShares(Struct, frozen=True, kw_only=True, tag="JobShares"):
    """A job's grants by the pool's record, by node; `leaving`: those of them that it is to give back, in good order.

    `standbys`: those of nodes that wait to take the place of one that is lost.
    `role_versions`: by node, the version of the record in which the pool last decided whether the node waits. The job
    follows a decision once, when its version is newer than the last one that it followed. Else the job's word counts.
    `failure_rate`: how often a node fails, per second, as the pool has seen it; 0: it has said nothing of that.
    `stranded`: so many nodes of the pool are of no use to the job that it cannot be begun on the others.
    `term`, `version`: of that record; an older one than was heard counts no more.
    """

    term: Count
    version: Count
    submission: Count
    grants: Mapping[Name, Count] = msgspec.field(default_factory=dict[str, int])
    leaving: frozenset[Count] = frozenset()
    standbys: frozenset[Count] = frozenset()
    role_versions: Mapping[Name, Count] = msgspec.field(default_factory=dict[str, int])
    wish: PoolWish = "run"
    stranded: bool = False
    failure_rate: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0


class NodeUnfit(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="NodeUnfit"):
    """A job would not take a node, and why. `grant`: by which it came; 0: not before a person lets it come back."""

    grant: Count = 0
    why: Text = ""


class JobPace(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="JobPace"):
    """How fast a job trains, as far as it was measured: with how many nodes a step took how long, and what it is.

    `micro_batches`, `samples`: of a step. `workers`: of a node. `flop_per_sample`: that training on one takes, 0 where
    nobody has said it. `layouts`: from how many nodes on which one belongs to them; () where each worker has the whole
    model. `experts`: of a layer, 0 where it has none; `slots`: of a node for them.
    """

    step_s: Mapping[Annotated[int, Meta(ge=1, le=1 << 20)], Seconds] = msgspec.field(default_factory=dict[int, float])
    micro_batches: Count = 0
    samples: Count = 0
    workers: Count = 0
    flop_per_sample: Annotated[float, Meta(ge=0.0, le=MOST_FLOP)] = 0.0
    layouts: Layouts = ()
    experts: Count = 0
    slots: Count = 0


class JobCosts(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="JobCosts"):
    """What failures have cost a job, as measured, in seconds beside a usual step; 0 for what was not.

    `hit_s`: it has lost a node, and gone on without; `replaced_s`: a standby took the place; `rolled_back_s`: it has
    gone back to what it had saved, what was done again among it. `saves_every_s`: how long it lets pass between saves.
    """

    hit_s: Seconds = 0.0
    replaced_s: Seconds = 0.0
    rolled_back_s: Seconds = 0.0
    saves_every_s: Seconds = 0.0


class JobStands(Struct, frozen=True, kw_only=True, tag="JobStands"):
    """What a job holds by its own record. A grant that it was told of, and does not hold, it never takes again.

    `heard`: the version of the newest shares that are in its record. `standbys`: of those held, by which nodes wait;
    `trains`: by which they are members of its plan. `refuses`: nodes that it would not take. `move_s`: what it costs of
    its training that a node joins and another leaves, as far as that was measured. `costs`: what failures have cost.
    `pace`: None before steps were.
    """

    submission: Count
    heard: Count
    held: frozenset[Count] = frozenset()
    standbys: frozenset[Count] = frozenset()
    trains: frozenset[Count] = frozenset()
    standing: JobStanding = "going"
    why: Annotated[Text, Meta(description="of one that is over")] = ""
    refuses: Mapping[Name, NodeUnfit] = msgspec.field(default_factory=dict[str, NodeUnfit])
    move_s: Seconds | None = None
    costs: JobCosts = JobCosts()
    pace: JobPace | None = None
