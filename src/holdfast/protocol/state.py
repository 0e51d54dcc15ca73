"""Where a worker's state may come from, and which parts of a step's state a worker holds."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.protocol.names import Blob, Count, Name, Struct, Text, WorkerId

#: of a seal, in bytes
SEAL_BYTES = 16
Seal = Annotated[bytes, Meta(min_length=SEAL_BYTES, max_length=SEAL_BYTES)]
Port = Annotated[int, Meta(ge=0, le=65535)]
#: of a snapshot
MAX_PARTS = 1 << 17
#: (term, generation, step) of a snapshot: in the order in which a job's lineages follow
SnapshotKey = tuple[int, int, int]


def seal_of(secret: bytes) -> bytes:
    """Return what the parts of snapshots carry that are taken under a plan with this secret."""
    return hashlib.sha256(b"holdfast snapshot " + secret).digest()[:SEAL_BYTES]


class SnapshotPart(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One of the parts of a snapshot of the state of `step`: what the member with the rank `part` has copied.

    `term` and `generation` are those of the plan under which the step was applied; `parts`: its world size. `seal`: of
    that plan, so that no other run of a job has the same.
    `everywhere`: the state was put away for another layout: each node of the plan has all parts, one for each place of
    a unit, in terms of whole tensors; and behind these, where the model has experts, those of its own members, one for
    each rank. That all are there proves nothing by itself: the record says whether it counts.
    """

    term: Count
    generation: Count
    step: Count
    part: Count
    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)]
    seal: Seal
    everywhere: bool = False

    @property
    def key(self) -> SnapshotKey:
        """Which snapshot it is a part of."""
        return self.term, self.generation, self.step

    @property
    def name(self) -> str:
        """Of its file."""
        kind = "place" if self.everywhere else "p"
        return f"step-{self.step:08d}-t{self.term}-g{self.generation}-{kind}{self.part}-of-{self.parts}"


class Keeper(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A node whose agent holds parts of a snapshot, and where it gives them out."""

    node: Name
    host: Text
    port: Port


#: so many members send one receiver its state, each a part, at the most: more fill no link that four do not
MAX_GIVERS = 4


class LiveSource(Struct, frozen=True, kw_only=True, tag="live"):
    """Members that have the state, and push it: each a part, in stripes."""

    members: Annotated[tuple[WorkerId, ...], Meta(min_length=1, max_length=MAX_GIVERS)]


class SnapshotSource(Struct, frozen=True, kw_only=True, tag="snapshot"):
    """A snapshot in the memory of nodes' agents.

    `parts`: of each, which of the `keepers` have it. `key`: what whoever reads them has to know. `everywhere`: as of
    its parts. `experts`: what lies in the last of those, one blob for each; some may be nowhere, for an expert lies in
    several.
    """

    term: Count
    generation: Count
    step: Count
    seal: Seal
    keepers: Annotated[tuple[Keeper, ...], Meta(min_length=1)]
    parts: Annotated[tuple[tuple[Count, ...], ...], Meta(min_length=1, max_length=MAX_PARTS)]
    key: Annotated[bytes, Meta(max_length=64)] = b""
    everywhere: bool = False
    experts: Annotated[tuple[Blob, ...], Meta(max_length=MAX_PARTS)] = ()

    @property
    def dense(self) -> int:
        """How many of the parts are not of experts alone."""
        return len(self.parts) - len(self.experts)

    def part(self, number: int) -> SnapshotPart:
        """Return the name of one of the parts."""
        return SnapshotPart(
            term=self.term,
            generation=self.generation,
            step=self.step,
            part=number,
            parts=len(self.parts),
            seal=self.seal,
            everywhere=self.everywhere,
        )


class CheckpointSource(Struct, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint, by its final name in the directory."""

    name: Text


StateSource = LiveSource | SnapshotSource | CheckpointSource


def kind_of(source: StateSource | None) -> str:
    """Return what kind of source this is, as events say it: live, snapshot, checkpoint, none."""
    return "none" if source is None else str(source.__struct_config__.tag)


class Holding(Struct, frozen=True, kw_only=True, tag="Holding"):
    """Which parts of a step's state a worker holds.

    `dense`: all that is the same on every worker. `experts`: which ones, as coordination.experts encodes them.
    """

    dense: bool = True
    experts: Blob = b""
