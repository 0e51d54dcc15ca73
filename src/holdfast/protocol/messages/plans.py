"""The plan of a generation as a message: its difference from an earlier plan, so that the cost follows the changes.

The earlier plan is the `base`. An agent that lacks it asks for the whole plan: a change of an empty one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, field

from holdfast.protocol.names import Blob, Count, Struct, Text
from holdfast.protocol.plan import Decision, GenerationPlan, Role
from holdfast.protocol.state import StateSource

#: bytes of a plan's digest
DIGEST_BYTES = 16
Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]


class Stayers(msgspec.Struct, frozen=True, array_like=True, tag="="):
    """`count` members of the base, from rank `first` there, in the same order."""

    first: Count
    count: Annotated[int, Meta(ge=1)]


class NewWorker(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A member that is not in the base, or is different there."""

    #: index of the worker on its node
    index: Annotated[int, Meta(ge=0, le=9999)]
    #: the rest of its id
    nonce: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,32}$")]
    state_port: Annotated[int, Meta(ge=0, le=65535)]
    role: Role | None = None


class NewMembers(msgspec.Struct, frozen=True, array_like=True, tag="+"):
    """New members on one node, ordered by rank."""

    node: Text
    host: Text
    workers: tuple[NewWorker, ...]


class PlanChange(Struct, frozen=True, kw_only=True, tag="PlanChange"):
    """A plan as a change of another one, ordered by rank."""

    #: the plan without the fields below
    rest: GenerationPlan
    #: generation of the changed plan, or 0 without one
    base: Count
    #: digest of the changed plan
    base_digest: Digest
    #: digest of this plan
    digest: Digest
    members: tuple[Stayers | NewMembers, ...]
    #: If above 0, the first `holders` members have the state, and send it to the others in turn.
    holders: Count = 0
    #: if `holders` is 0, the sources of members that receive the state, by rank
    sources: dict[Count, StateSource] = field(default_factory=dict[int, StateSource])
    #: the placed experts of a rank, if the same member has others in the base
    placement: dict[Count, Blob] = field(default_factory=dict[int, bytes])
    #: the held experts of a rank, if the same member has others in the base
    held: dict[Count, Blob] = field(default_factory=dict[int, bytes])


class Shares(Struct, frozen=True, kw_only=True, tag="Shares"):
    """The micro-batches of a generation's first step, by replica group, if they differ from the base."""

    #: micro-batches of the step
    micro_batches: Count
    #: The share of a replica group, if it differs from its share in the base. A new replica group has none in the base.
    other: dict[Count, tuple[Count, ...]]


class BeginNode(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="BeginNode"):
    """Orders the members on this node to leave their generation, and to enter this one. See `Begin`."""

    plan: PlanChange
    decision: Decision
    #: None: shares as the numbers of the replica groups give them
    shares: Shares | None
    #: by replica group, as in `Begin`
    kept: tuple[tuple[Count, ...], ...] = ()


class PrepareNode(Struct, frozen=True, kw_only=True, tag="PrepareNode"):
    """Orders the members on this node to build this group next to the one in use. See `Prepare`."""

    plan: PlanChange


class AskPlan(Struct, frozen=True, kw_only=True, tag="AskPlan"):
    """An agent lacks the base of a plan, and asks for the whole plan."""

    generation: Count
