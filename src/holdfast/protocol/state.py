"""Sources of a worker's state, and the parts of a state that a worker holds."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.protocol.names import Blob, Count, Name, Struct, Text, WorkerId

#: bytes of a seal
SEAL_BYTES = 16
Seal = Annotated[bytes, Meta(min_length=SEAL_BYTES, max_length=SEAL_BYTES)]
Port = Annotated[int, Meta(ge=0, le=65535)]
#: most parts of a snapshot
MAX_PARTS = 1 << 17
#: (term, generation, step) of a snapshot; later lineages of a job are greater
SnapshotKey = tuple[int, int, int]


def seal_of(secret: bytes) -> bytes:
    """Return the seal of snapshots that are taken under a plan with this secret."""
    return hashlib.sha256(b"holdfast snapshot " + secret).digest()[:SEAL_BYTES]


class SnapshotPart(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One part of a snapshot of the state of `step`.

    If `everywhere`, the state was stashed for another layout. Then each node of the plan has all parts: one for each
    local rank of a replica group, as whole tensors, and with experts one more for each of its own members. That all
    parts exist does not mean that the stash counts: the record says that.
    """

    #: term of the plan under which the step was applied
    term: Count
    #: generation of that plan
    generation: Count
    step: Count
    #: rank of the member that copied it
    part: Count
    #: number of parts; the world size, unless `everywhere`
    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)]
    #: seal of the plan; no other run of the job has the same
    seal: Seal
    #: whether each node has all parts
    everywhere: bool = False

    @property
    def key(self) -> SnapshotKey:
        """The snapshot of this part."""
        return self.term, self.generation, self.step

    @property
    def name(self) -> str:
        """The name of its file."""
        kind = "place" if self.everywhere else "p"
        return f"step-{self.step:08d}-t{self.term}-g{self.generation}-{kind}{self.part}-of-{self.parts}"


class Keeper(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A node with parts of a snapshot, and the address at which it serves them."""

    node: Name
    host: Text
    port: Port


#: Most members that send one receiver its state, each a part. More than four do not fill a link better.
MAX_GIVERS = 4


class LiveSource(Struct, frozen=True, kw_only=True, tag="live"):
    """Members that have the state, and send it, each a part, in stripes."""

    members: Annotated[tuple[WorkerId, ...], Meta(min_length=1, max_length=MAX_GIVERS)]


class SnapshotSource(Struct, frozen=True, kw_only=True, tag="snapshot"):
    """A snapshot in the memory of nodes."""

    term: Count
    generation: Count
    step: Count
    seal: Seal
    keepers: Annotated[tuple[Keeper, ...], Meta(min_length=1)]
    #: for each part, the indices of the keepers that have it
    parts: Annotated[tuple[tuple[Count, ...], ...], Meta(min_length=1, max_length=MAX_PARTS)]
    #: secret that readers must show
    key: Annotated[bytes, Meta(max_length=64)] = b""
    #: as in `SnapshotPart`
    everywhere: bool = False
    #: The experts in each of the last parts. An expert is in several parts, so some parts may be lost.
    experts: Annotated[tuple[Blob, ...], Meta(max_length=MAX_PARTS)] = ()

    @property
    def dense(self) -> int:
        """Number of parts that are not only experts."""
        return len(self.parts) - len(self.experts)

    def part(self, number: int) -> SnapshotPart:
        """Return one of the parts."""
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
    """A checkpoint."""

    #: its final name in the directory
    name: Text


StateSource = LiveSource | SnapshotSource | CheckpointSource


def source_kind(source: StateSource | None) -> str:
    """Return the kind of a source as events name it: live, snapshot, checkpoint, none."""
    return "none" if source is None else str(source.__struct_config__.tag)


class Holding(Struct, frozen=True, kw_only=True, tag="Holding"):
    """The parts of a state that a worker holds."""

    #: whether it has everything that is equal on all workers
    dense: bool = True
    #: its experts, as coordination.experts encodes them
    experts: Blob = b""
