"""What a generation is: its members, what becomes of the step before it, and where its experts live."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta, field

from holdfast.protocol.commit import Commit
from holdfast.protocol.names import Blob, Count, Struct, Text, WorkerId, node_of
from holdfast.protocol.state import LiveSource, SnapshotPart, StateSource, seal_of

#: Steps over which loads are taken where nobody ever looks at the placement again (Lazarus, 6.1: looks every 200).
LOADS_WINDOW = 200


class Phase(StrEnum):
    """Where a worker stands inside a step (DESIGN.md 3.1)."""

    IDLE = "idle"  # in no generation yet
    ENTERING = "entering"  # building the group, settling the decision, moving state
    FORWARD = "forward"  # as part of that: the step that a generation before has left is applied
    ADOPTING = "adopting"  # as part of that: a state that has come whole takes the place of what was here
    COMPUTE = "compute"
    REDUCING = "reducing"
    READY = "ready"  # every local reduction has returned, and v is known, but for its flags
    VOTED = "voted"  # the commit operation is issued
    ABANDONED = "abandoned"  # it was left, or failed: perhaps it passed elsewhere
    REFUSED = "refused"  # the reductions have led to a v whose samples are not those of the step
    PASSED = "passed"  # the commit operation returned
    APPLYING = "applying"  # the optimizer changes the state
    FINISHED = "finished"  # no step left to do


class Passed(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Passed"):
    """A step that has passed, with its v; the generation in which it was applied and its world, 0 where not known."""

    step: Count
    commit: Commit
    generation: Count = 0
    world: Count = 0


#: of so many of the newest steps a worker knows v (of fewer where they log much); it gives them with its state
MAX_PASSED = 512
PassedSteps = Annotated[tuple[Passed, ...], Meta(max_length=MAX_PASSED)]


class DecisionKind(StrEnum):
    START = "start"  # the initial state of one worker becomes everybody's
    REDO = "redo"
    FORWARD = "forward"
    ROLLBACK = "rollback"


class Decision(Struct, frozen=True, kw_only=True, tag="Decision"):
    """What becomes of the step that a generation's end interrupted.

    `applied` is the step whose state every member holds once the decision is carried out; the next step is one more.
    FORWARD carries v. `source`, of ROLLBACK: where all members get that state from.
    """

    kind: DecisionKind
    applied: Count
    commit: Commit | None = None
    source: StateSource | None = None


class Role(Struct, frozen=True, kw_only=True, tag="Role"):
    """Which part of a model replica a worker is: a stage of it, and there a place in its node; both 0-based."""

    stage: Count = 0
    place: Count = 0


#: The role of a worker that has a whole replica; the same object wherever it is meant: so it takes no room in messages.
WHOLE_REPLICA = Role()


class Member(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Member"):
    """One worker of a generation; its rank is its place in the plan."""

    worker: WorkerId
    host: Text
    state_port: Annotated[int, Meta(ge=0, le=65535)]
    role: Role = WHOLE_REPLICA

    @property
    def node(self) -> str:
        """The member's node."""
        return node_of(self.worker)


class ExpertShape(Struct, frozen=True, kw_only=True, tag="ExpertShape"):
    """The experts of a model, and this node's room for them in each layer."""

    layers: Annotated[int, Meta(ge=1, le=4096)]
    experts: Annotated[int, Meta(ge=1, le=65534)]  # per layer
    slots: Annotated[int, Meta(ge=1, le=65535)]  # of the node, per layer


class JoinedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that has joined, and its processes; `worker_pids` by index on the node.

    `clock_off_s`: how far its clock was ahead of the coordinator's; 0 if that is less than the measurement's own
    uncertainty, or not known yet. Nothing is decided by it.
    """

    node: str
    agent_pid: int
    worker_pids: tuple[int, ...]
    clock_off_s: float = 0.0


class FaultThreshold(msgspec.Struct, frozen=True, kw_only=True):
    """On how many distinct nodes each expert, or each part of a snapshot, should live (asked), and does (given)."""

    asked: int
    given: int


class ExpertPlan(Struct, frozen=True, kw_only=True, tag="ExpertPlan"):
    """Where every expert replica lives, one blob per rank (see coordination.experts).

    `held`: what each rank holds on entering, `placement`: what it is to hold. `asked` and `given`: on how many distinct
    nodes each expert should live, and does. `moves`: experts that travel between workers. `window`: over about so many
    steps the loads of the next placement are to be taken. `repaired`: what was held has stayed where it was, and only
    what was missing has moved; nobody has looked for a better placement yet. `beside`: where the generation begins by
    a swap, experts travel while its first step is computed, for which whoever holds them on entering serves them.
    """

    layers: int
    experts: int
    placement: tuple[Blob, ...]
    held: tuple[Blob, ...]
    moves: int
    asked: int
    given: int
    window: Annotated[int, Meta(ge=1)] = LOADS_WINDOW
    repaired: bool = False
    beside: bool = False


class GenerationPlan(Struct, frozen=True, kw_only=True, dict=True, tag="GenerationPlan"):
    """A numbered configuration. `sources` says where members that lack the state get it, where it is not the decision's
    source.

    `witnesses`: the ranks of those that tell of a step as it passes, ascending. `last`: nothing is computed in it. Its
    members save what they have, where they save anything, and finish. `counts`: how many micro-batches of a step each
    unit computes, () for as many as the others, or one more. A unit is one member, unless the job has a layout: then
    it is those that have a replica between them, in a row, by their places (docs/layouts.md). `counts_flop`: it is to
    be counted what a round takes. `puts_away`: nothing is computed in it either. Its members put the state into the
    memory of their nodes, from where workers under another layout read it.
    """

    term: Count
    generation: Count
    members: tuple[Member, ...]
    sources: dict[str, StateSource] = field(default_factory=dict[str, StateSource])
    expert_plan: ExpertPlan | None = None
    secret: Annotated[bytes, Meta(max_length=64)] = b""
    witnesses: tuple[Count, ...] = ()
    last: bool = False
    counts: tuple[Count, ...] = ()
    counts_flop: bool = False
    puts_away: bool = False

    def rank(self, worker: str) -> int | None:
        """Return the rank of a worker, None where it is no member."""
        return self._ranks.get(worker)

    def is_witness(self, worker: str) -> bool:
        """Tell whether a worker tells of a step as it passes."""
        return self.rank(worker) in self.witnesses

    def is_counting(self, worker: str) -> bool:
        """Tell whether a worker is to count what a round takes: one has its own; with experts all have parts of it."""
        return self.counts_flop and (self.expert_plan is not None or self.rank(worker) == 0)

    def source_of(self, worker: str, decision: Decision | None) -> StateSource | None:
        """Return where a member gets the state from with which the generation begins, None where it has it.

        Args:
            decision: what the generation begins with, None after a swap.
        """
        return self.sources.get(worker) or (decision.source if decision is not None else None)

    def snapshot_part(self, rank: int, step: int) -> SnapshotPart:
        """Return which part of the snapshot of a step a member has, where that was applied under this plan."""
        return SnapshotPart(
            term=self.term,
            generation=self.generation,
            step=step,
            part=rank,
            parts=len(self.members),
            seal=seal_of(self.secret),
        )

    def kept_part(self, rank: int, step: int) -> SnapshotPart | None:
        """Return which part of a step's state a member puts away, its experts apart; None: another unit of its node."""
        first = next(other for other, member in enumerate(self.members) if member.node == self.members[rank].node)
        if self.unit_of(first) != self.unit_of(rank):
            return None
        return self._put_away(rank % self.places, step)

    def kept_experts(self, rank: int, step: int) -> SnapshotPart | None:
        """Return in which part of the state of a step a member puts its experts away; None: the model has none."""
        return self._put_away(self.places + rank, step) if self.expert_plan is not None else None

    def _put_away(self, part: int, step: int) -> SnapshotPart:
        parts = self.places + (len(self.members) if self.expert_plan is not None else 0)
        return msgspec.structs.replace(self.snapshot_part(0, step), part=part, parts=parts, everywhere=True)

    @cached_property
    def places(self) -> int:
        """How many members have one replica of the model between them: a unit; 1 where each has a whole one."""
        return 1 + max((member.role.place for member in self.members), default=0)

    @property
    def units(self) -> int:
        """How many replicas of the model there are."""
        return len(self.members) // self.places

    def unit_of(self, rank: int) -> int:
        """Return the number of the unit that a rank is of: units follow each other, each by its places."""
        return rank // self.places

    @property
    def unit_heads(self) -> tuple[str, ...]:
        """The first worker of each unit, by unit."""
        return self.workers[:: self.places]

    def senders(self, worker: str) -> tuple[str, ...]:
        """Return the members that send a member its state, from their memory."""
        source = self.sources.get(worker)
        return source.members if isinstance(source, LiveSource) else ()

    def receivers(self, worker: str) -> tuple[str, ...]:
        """Return the members that a member sends the state to, from its memory."""
        return self._receivers.get(worker, ())

    def domain_of(self, worker: str) -> tuple[int, ...]:
        """Return the ranks of all members of a member's role, its own among them, ascending."""
        roles = [member.role for member in self.members]
        mine = next(member.role for member in self.members if member.worker == worker)
        return tuple(rank for rank, role in enumerate(roles) if role == mine)

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """The members' worker ids by rank."""
        return tuple(member.worker for member in self.members)

    @cached_property
    def _receivers(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for receiver, source in self.sources.items():
            for sender in source.members if isinstance(source, LiveSource) else ():
                found.setdefault(sender, []).append(receiver)
        return {sender: tuple(receivers) for sender, receivers in found.items()}

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {worker: rank for rank, worker in enumerate(self.workers)}
