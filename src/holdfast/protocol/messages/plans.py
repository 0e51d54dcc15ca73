"""How a generation's plan is told to a node: as what it changes of an earlier one, so that it costs what changes.

The plan that it changes is the `base`; whoever does not have it asks for the whole, which is a change of nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, field

from holdfast.protocol.names import Blob, Count, Struct, Text
from holdfast.protocol.plan import Decision, GenerationPlan, Role
from holdfast.protocol.state import StateSource

#: how long a plan's digest is, in bytes
DIGEST_BYTES = 16
Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]


class Stayers(msgspec.Struct, frozen=True, array_like=True, tag="="):
    """Members of the base, by their ranks there: `count` of them from rank `first` on, in the same order."""

    first: Count
    count: Annotated[int, Meta(ge=1)]


class NewWorker(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A member that the base does not name, or names differently: its place on the node, the rest of its id, itself."""

    index: Annotated[int, Meta(ge=0, le=9999)]
    nonce: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,32}$")]
    state_port: Annotated[int, Meta(ge=0, le=65535)]
    role: Role | None = None


class NewMembers(msgspec.Struct, frozen=True, array_like=True, tag="+"):
    """New members of one node, in the order of their ranks."""

    node: Text
    host: Text
    workers: tuple[NewWorker, ...]


class PlanChange(Struct, frozen=True, kw_only=True, tag="PlanChange"):
    """One plan as a change of another, in the order of its ranks.

    `rest` is the plan without what follows. `base` is the generation of the plan that it changes, 0 for none;
    `base_digest` and `digest` are those of the two plans. `members`: its members. `holders`: the first so many members
    have the state, and each of the others is sent it by one of them, in turn; where it is not so, `sources` says who is
    sent it, by rank, and `holders` is 0. `placement`: which experts are to be on a rank, where that is not what was to
    be on that member in the base; `held`: which ones are, where that is not what was to be.
    """

    rest: GenerationPlan
    base: Count
    base_digest: Digest
    digest: Digest
    members: tuple[Stayers | NewMembers, ...]
    holders: Count = 0
    sources: dict[Count, StateSource] = field(default_factory=dict[int, StateSource])
    placement: dict[Count, Blob] = field(default_factory=dict[int, bytes])
    held: dict[Count, Blob] = field(default_factory=dict[int, bytes])


class Shares(Struct, frozen=True, kw_only=True, tag="Shares"):
    """Who computes which micro-batches of a generation's first step: by unit, where it is not what the unit had in
    the base (that of its number there; nothing for a new one). `micro_batches`: how many the step has."""

    micro_batches: Count
    other: dict[Count, tuple[Count, ...]]


class BeginNode(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="BeginNode"):
    """The members on this node are to leave whatever they are in, and to enter this generation (see Begin).

    `shares` None: those of the units' numbers. `kept`: by unit, as in Begin.
    """

    plan: PlanChange
    decision: Decision
    shares: Shares | None
    kept: tuple[tuple[Count, ...], ...] = ()


class PrepareNode(Struct, frozen=True, kw_only=True, tag="PrepareNode"):
    """The members on this node are to build this group beside the one in use (see Prepare)."""

    plan: PlanChange


class AskPlan(Struct, frozen=True, kw_only=True, tag="AskPlan"):
    """An agent cannot make a plan of what it was told, for it lacks the base: it wants the whole."""

    generation: Count
