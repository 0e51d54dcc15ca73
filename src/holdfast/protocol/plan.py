"""The plan of a generation: its members, the decision about the interrupted step, and the placement of the experts."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta, field

from holdfast.protocol.commit import Commit
from holdfast.protocol.names import Blob, Count, Struct, Text, WorkerId, node_of
from holdfast.protocol.state import LiveSource, SnapshotPart, StateSource, seal_of

#: Steps over which loads are averaged if the placement is never reconsidered (Lazarus, 6.1, does so every 200 steps).
LOADS_WINDOW = 200


class Phase(StrEnum):
    """The phase of a worker within a step."""

    #: in no generation yet
    IDLE = "idle"
    #: builds the group, carries out the decision, moves state
    ENTERING = "entering"
    #: while entering: applies the step that an earlier generation has left
    FORWARD = "forward"
    #: while entering: replaces its state by a received one
    ADOPTING = "adopting"
    COMPUTE = "compute"
    REDUCING = "reducing"
    #: Every local reduction has returned, and the step result is known, but for its flags.
    READY = "ready"
    #: The commit operation is issued.
    VOTED = "voted"
    #: The commit operation was left, or failed. It may have passed on other workers.
    ABANDONED = "abandoned"
    #: The step result has wrong samples, or workers differ.
    REFUSED = "refused"
    #: The commit operation returned.
    PASSED = "passed"
    #: The optimizer changes the state.
    APPLYING = "applying"
    #: No step is left.
    FINISHED = "finished"


class PassedStep(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Passed"):
    """A step that has passed its vote, with its result."""

    step: Count
    commit: Commit
    #: generation in which it was applied, or 0 if unknown
    generation: Count = 0
    #: world size of that generation, or 0 if unknown
    world: Count = 0


#: Step results that a worker keeps, and sends with its state. Fewer if the steps log many values.
MAX_PASSED = 512
PassedSteps = Annotated[tuple[PassedStep, ...], Meta(max_length=MAX_PASSED)]


class DecisionKind(StrEnum):
    #: All workers begin with the initial state of one of them.
    """Decision about the step that the end of a generation interrupted. See docs/protocol.md."""

    START = "start"
    REDO = "redo"
    FORWARD = "forward"
    ROLLBACK = "rollback"


class Decision(Struct, frozen=True, kw_only=True, tag="Decision"):
    """The decision about the step that the end of a generation interrupted."""

    kind: DecisionKind
    #: the step of the state that every member holds once the decision is carried out
    applied: Count
    #: the step result, for FORWARD
    commit: Commit | None = None
    #: the source of the state for all members, for ROLLBACK
    source: StateSource | None = None


class Role(Struct, frozen=True, kw_only=True, tag="Role"):
    """The part of a model replica that a worker has."""

    #: stage of the pipeline, 0-based
    stage: Count = 0
    #: local rank within the replica group, 0-based
    place: Count = 0


#: The role of a worker that has a whole replica. Always this object, so that messages leave it out.
WHOLE_REPLICA = Role()


class Member(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Member"):
    """One worker of a generation. Its rank is its position in the plan."""

    worker: WorkerId
    host: Text
    state_port: Annotated[int, Meta(ge=0, le=65535)]
    role: Role = WHOLE_REPLICA

    @property
    def node(self) -> str:
        """The member's node."""
        return node_of(self.worker)


class ExpertShape(Struct, frozen=True, kw_only=True, tag="ExpertShape"):
    """The number of experts of a model, and of expert slots on this node."""

    layers: Annotated[int, Meta(ge=1, le=4096)]
    #: per MoE layer
    experts: Annotated[int, Meta(ge=1, le=65534)]
    #: of the node, per MoE layer
    slots: Annotated[int, Meta(ge=1, le=65535)]


class JoinedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that has joined, and its processes."""

    node: str
    agent_pid: int
    #: by index on the node
    worker_pids: tuple[int, ...]
    #: Seconds by which its clock is ahead of the coordinator's. 0 if that is less than the uncertainty of the
    #: measurement, or unknown. No decision uses it.
    clock_off_s: float = 0.0


class FaultThreshold(msgspec.Struct, frozen=True, kw_only=True):
    """Number of distinct nodes that hold each expert, or each part of a snapshot."""

    #: the wanted number
    asked: int
    #: the actual number
    given: int


class ExpertPlan(Struct, frozen=True, kw_only=True, tag="ExpertPlan"):
    """The placement of all expert replicas: one blob per rank (see coordination.experts)."""

    layers: int
    experts: int
    #: the experts that each rank will hold
    placement: tuple[Blob, ...]
    #: the experts that each rank holds when it enters
    held: tuple[Blob, ...]
    #: number of experts that move between workers
    moves: int
    #: wanted number of distinct nodes for each expert
    asked: int
    #: actual number of distinct nodes for each expert
    given: int
    #: steps over which the loads for the next placement are averaged
    window: Annotated[int, Meta(ge=1)] = LOADS_WINDOW
    #: whether only missing experts have moved, and no better placement was computed yet
    repaired: bool = False
    #: Whether experts move during the first step after a swap. Ranks that held them before compute them for that step.
    beside: bool = False


class GenerationPlan(Struct, frozen=True, kw_only=True, dict=True, tag="GenerationPlan"):
    """A numbered configuration of the job.

    With a layout, a replica group is several consecutive members that have one replica of the model together
    (docs/layouts.md). Else each member is a replica group.
    """

    term: Count
    generation: Count
    members: tuple[Member, ...]
    #: sources of the state for members that lack it, if they differ from the decision's source
    sources: dict[str, StateSource] = field(default_factory=dict[str, StateSource])
    expert_plan: ExpertPlan | None = None
    secret: Annotated[bytes, Meta(max_length=64)] = b""
    #: ranks that report each step as it passes, ascending
    witnesses: tuple[Count, ...] = ()
    #: whether the job ends: its members compute nothing, save their state if they save any, and finish
    last: bool = False
    #: micro-batches of a step for each replica group; () for equal shares
    counts: tuple[Count, ...] = ()
    #: whether members count the FLOP of a round
    counts_flop: bool = False
    #: Whether the layout changes: its members compute nothing, and stash their state in the memory of their nodes, from
    #: where workers under another layout read it.
    puts_away: bool = False

    def rank(self, worker: str) -> int | None:
        """Return the rank of a worker, or None if it is not a member."""
        return self._ranks.get(worker)

    def is_witness(self, worker: str) -> bool:
        """Return whether a worker reports each step as it passes."""
        return self.rank(worker) in self.witnesses

    def is_counting(self, worker: str) -> bool:
        """Return whether a worker counts the FLOP of a round: rank 0, or with experts all ranks."""
        return self.counts_flop and (self.expert_plan is not None or self.rank(worker) == 0)

    def source_of(self, worker: str, decision: Decision | None) -> StateSource | None:
        """Return the source of a member's state when the generation begins, or None if the member has the state.

        Args:
            decision: the decision that the generation begins with, or None after a swap.
        """
        return self.sources.get(worker) or (decision.source if decision is not None else None)

    def snapshot_part(self, rank: int, step: int) -> SnapshotPart:
        """Return the part of a snapshot that a member has of a step that was applied under this plan."""
        return SnapshotPart(
            term=self.term,
            generation=self.generation,
            step=step,
            part=rank,
            parts=len(self.members),
            seal=seal_of(self.secret),
        )

    def stash_part(self, rank: int, step: int) -> SnapshotPart | None:
        """Return the part of the dense state that a member stashes, or None if its node stashes another copy."""
        first = next(other for other, member in enumerate(self.members) if member.node == self.members[rank].node)
        if self.unit_of(first) != self.unit_of(rank):
            return None
        return self._stash_part_of(rank % self.places, step)

    def expert_stash_part(self, rank: int, step: int) -> SnapshotPart | None:
        """Return the part in which a member stashes its experts, or None if the model has no experts."""
        return self._stash_part_of(self.places + rank, step) if self.expert_plan is not None else None

    def _stash_part_of(self, part: int, step: int) -> SnapshotPart:
        """Return this part of the stash: first the dense state by local rank, then each member's experts, if any."""
        parts = self.places + (len(self.members) if self.expert_plan is not None else 0)
        return msgspec.structs.replace(self.snapshot_part(0, step), part=part, parts=parts, everywhere=True)

    @cached_property
    def places(self) -> int:
        """Number of members in a replica group."""
        return 1 + max((member.role.place for member in self.members), default=0)

    @property
    def units(self) -> int:
        """Number of replica groups."""
        return len(self.members) // self.places

    def unit_of(self, rank: int) -> int:
        """Return the number of a rank's replica group. Ranks of a group are consecutive."""
        return rank // self.places

    @property
    def unit_heads(self) -> tuple[str, ...]:
        """The first worker of each replica group."""
        return self.workers[:: self.places]

    def senders(self, worker: str) -> tuple[str, ...]:
        """Return the members that send a member its state."""
        source = self.sources.get(worker)
        return source.members if isinstance(source, LiveSource) else ()

    def receivers(self, worker: str) -> tuple[str, ...]:
        """Return the members to which a member sends the state."""
        return self._receivers.get(worker, ())

    def domain_of(self, worker: str) -> tuple[int, ...]:
        """Return the ranks of all members with the same role as a member, including its own."""
        roles = [member.role for member in self.members]
        mine = next(member.role for member in self.members if member.worker == worker)
        return tuple(rank for rank, role in enumerate(roles) if role == mine)

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """The members' worker ids by rank."""
        return tuple(member.worker for member in self.members)

    @cached_property
    def _receivers(self) -> dict[str, tuple[str, ...]]:
        """The members that receive state from each sending member; members that send none are absent."""
        found: dict[str, list[str]] = {}
        for receiver, source in self.sources.items():
            for sender in source.members if isinstance(source, LiveSource) else ():
                found.setdefault(sender, []).append(receiver)
        return {sender: tuple(receivers) for sender, receivers in found.items()}

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {worker: rank for rank, worker in enumerate(self.workers)}
