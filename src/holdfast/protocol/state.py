"""Where a worker's state may come from, and which parts of a step's state a worker holds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.names import Blob, Struct, Text, WorkerId


class LiveSource(Struct, frozen=True, kw_only=True, tag="live"):
    """Members that have the state, and push it; the first one does."""

    members: Annotated[tuple[WorkerId, ...], Meta(min_length=1)]


class SnapshotSource(Struct, frozen=True, kw_only=True, tag="snapshot"):
    """The memory of nodes' agents; nobody has any snapshots yet."""

    nodes: Annotated[tuple[Text, ...], Meta(min_length=1)]


class CheckpointSource(Struct, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint, by its final name in the directory."""

    name: Text


StateSource = LiveSource | SnapshotSource | CheckpointSource


def kind_of(source: StateSource | None) -> str:
    """Return what kind of source this is, as events say it: live, snapshot, checkpoint, none."""
    return "none" if source is None else str(source.__struct_config__.tag)


class Holding(Struct, frozen=True, kw_only=True):
    """Which parts of a step's state a worker holds.

    `dense`: all that is the same on every worker. `experts`: which ones, as coordination.experts encodes them.
    """

    dense: bool = True
    experts: Blob = b""
