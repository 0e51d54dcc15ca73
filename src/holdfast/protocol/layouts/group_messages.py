"""Messages between workers and their agent to form replica groups (docs/layouts.md). They do not leave the node."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.layout_list import Layouts
from holdfast.protocol.names import Count, KeyName, KeyValue, Struct, Text, WorkerId

#: The name of a replica group. It depends on its workers, so that messages of an earlier group are recognized.
UnitName = Annotated[str, Meta(pattern=r"^[0-9a-f]{1,32}$")]
#: most keys of one worker for all groups of its replica group
MAX_UNIT_KEYS = 64


class JoinUnit(Struct, frozen=True, kw_only=True, tag="JoinUnit"):
    """A worker has called `holdfast.init()`, and joins a replica group of this layout."""

    worker: WorkerId
    layout: Layout = WHOLE
    #: all layouts of the job, if there are several; the agent then chooses the one in force
    layouts: Layouts = ()


class UnitAwaits(Struct, frozen=True, kw_only=True, tag="UnitAwaits"):
    """The answer to `JoinUnit`, sent again whenever it changes."""

    #: indices on the node of workers that have not come yet
    missing: tuple[Count, ...]


class UnitFormed(Struct, frozen=True, kw_only=True, tag="UnitFormed"):
    """All workers of the replica group have come."""

    unit: UnitName
    #: by local rank
    workers: Annotated[tuple[WorkerId, ...], Meta(min_length=1, max_length=1 << 20)]
    #: path of the shared memory for their proposals
    page: Text = ""
    #: The layout in force, if the job lists several. Under it, a replica group may be a single worker.
    layout: Layout = WHOLE
    #: folder of the agent to stash the state when the layout changes
    snapshots: Text = ""


class UnitRefused(Struct, frozen=True, kw_only=True, tag="UnitRefused"):
    """No replica group can be formed: the script's input is wrong."""

    why: Text


class UnitPost(Struct, frozen=True, kw_only=True, tag="UnitPost"):
    """Rendezvous within a replica group: keys of this worker for all others (`key_of` with its local rank)."""

    worker: WorkerId
    unit: UnitName
    keys: Annotated[dict[KeyName, KeyValue], Meta(max_length=MAX_UNIT_KEYS)]


class UnitPosted(Struct, frozen=True, kw_only=True, tag="UnitPosted"):
    """Keys that another worker of the replica group has posted."""

    unit: UnitName
    keys: Annotated[dict[KeyName, KeyValue], Meta(max_length=MAX_UNIT_KEYS)]


#: messages from a worker, and to it
UnitWord = JoinUnit | UnitPost
UnitAnswer = UnitAwaits | UnitFormed | UnitRefused | UnitPosted
