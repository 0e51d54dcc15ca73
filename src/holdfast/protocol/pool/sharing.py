"""Messages between a pool and the coordinator of a job. They contain whole states, never changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast.protocol.job_spec import MOST_FLOP
from holdfast.protocol.layouts.layout_list import Layouts
from holdfast.protocol.names import Count, Name, Seconds, Struct, Text

#: What a job should do: train; save its state and leave its nodes; save it and end; end at once.
PoolWish = Literal["run", "suspend", "stop", "stop_now"]
#: the state of a job by its own record
JobStanding = Literal["going", "suspended", "finished", "stopped", "failed"]


class JobShares(Struct, frozen=True, kw_only=True, tag="JobShares"):
    """The grants of a job by the pool's record, by node."""

    #: term of the record; older records than one seen before are ignored
    term: Count
    #: version of the record
    version: Count
    submission: Count
    grants: Mapping[Name, Count] = msgspec.field(default_factory=dict[str, int])
    #: grants that the job must return
    leaving: frozenset[Count] = frozenset()
    #: grants of nodes that wait as standbys
    standbys: frozenset[Count] = frozenset()
    #: By node, the version of the record in which the pool last decided whether the node waits. The job follows each
    #: decision once, if its version is newer than the last one that it followed. Otherwise the job's own choice counts.
    role_versions: Mapping[Name, Count] = msgspec.field(default_factory=dict[str, int])
    wish: PoolWish = "run"
    #: whether too few nodes of the pool are usable for the job
    stranded: bool = False
    #: failures of a node per second, or 0 if unknown
    failure_rate: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0


class NodeUnfit(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="NodeUnfit"):
    """A node that a job refuses."""

    #: The grant by which it came. 0: refused until a user allows it.
    grant: Count = 0
    why: Text = ""


class JobPace(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="JobPace"):
    """Measured step times of a job."""

    #: seconds of a step, by number of nodes
    step_s: Mapping[Annotated[int, Meta(ge=1, le=1 << 20)], Seconds] = msgspec.field(default_factory=dict[int, float])
    #: of a step
    micro_batches: Count = 0
    #: of a step
    samples: Count = 0
    #: of a node
    workers: Count = 0
    #: FLOP of training on a sample, or 0 if unknown
    flop_per_sample: Annotated[float, Meta(ge=0.0, le=MOST_FLOP)] = 0.0
    #: layouts with the number of nodes from which each is used; () if each worker has the whole model
    layouts: Layouts = ()
    #: experts of a layer, or 0
    experts: Count = 0
    #: expert slots of a node
    slots: Count = 0


class JobCosts(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="JobCosts"):
    """Measured costs of failures of a job, in seconds beyond a usual step; 0 if unknown."""

    #: loss of a node without a replacement
    hit_s: Seconds = 0.0
    #: loss of a node that a standby replaced
    replaced_s: Seconds = 0.0
    #: roll-back to a checkpoint, with the repeated steps
    rolled_back_s: Seconds = 0.0
    #: seconds between checkpoints
    saves_every_s: Seconds = 0.0


class JobState(Struct, frozen=True, kw_only=True, tag="JobStands"):
    """The state of a job by its own record."""

    submission: Count
    #: version of the newest shares in its record
    heard: Count
    #: Grants that it holds. A grant that it has seen, and does not hold, is never used again.
    held: frozenset[Count] = frozenset()
    #: held grants of nodes that wait
    standbys: frozenset[Count] = frozenset()
    #: held grants of members of its plan
    trains: frozenset[Count] = frozenset()
    standing: JobStanding = "going"
    why: Annotated[Text, Meta(description="of one that is over")] = ""
    #: nodes that it refuses
    refuses: Mapping[Name, NodeUnfit] = msgspec.field(default_factory=dict[str, NodeUnfit])
    #: seconds of training that one node costs that joins while another leaves; None if unknown
    move_s: Seconds | None = None
    #: costs of failures
    costs: JobCosts = JobCosts()
    #: None before any step was measured
    pace: JobPace | None = None
