"""What a node's workers and their agent say to each other to form units (docs/layouts.md); nobody else hears it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.several import Layouts
from holdfast.protocol.names import Count, KeyName, KeyValue, Struct, Text, WorkerId

#: a unit's name: which workers are in it, so that nothing of an earlier one is taken for this one's
UnitName = Annotated[str, Meta(pattern=r"^[0-9a-f]{1,32}$")]
#: of one worker, for all groups of its unit
MAX_UNIT_KEYS = 64


class JoinUnit(Struct, frozen=True, kw_only=True, tag="JoinUnit"):
    """A worker has come to `holdfast.init()`, and is to be a place of a unit of this layout.

    Where the job lists several it is of the one in force, which is told with the unit.
    """

    worker: WorkerId
    layout: Layout = WHOLE
    layouts: Layouts = ()


class UnitAwaits(Struct, frozen=True, kw_only=True, tag="UnitAwaits"):
    """The answer to JoinUnit, whenever that changes: these have not come yet, by their index on the node."""

    missing: tuple[Count, ...]


class UnitFormed(Struct, frozen=True, kw_only=True, tag="UnitFormed"):
    """All have come: `workers`, by place, are the unit. `page`: path of the memory for their proposals.

    Where the job lists several layouts, `layout` is the one in force, under which a unit may be one worker alone;
    `snapshots`: the agent's folder, for the state when another one is to be in force.
    """

    unit: UnitName
    workers: Annotated[tuple[WorkerId, ...], Meta(min_length=1, max_length=1 << 20)]
    page: Text = ""
    layout: Layout = WHOLE
    snapshots: Text = ""


class UnitRefused(Struct, frozen=True, kw_only=True, tag="UnitRefused"):
    """No unit can be formed of what was asked for: the script's input is bad."""

    why: Text


class UnitPost(Struct, frozen=True, kw_only=True, tag="UnitPost"):
    """Rendezvous within a unit: keys of this worker's for all the others, each under its place (`key_of`)."""

    worker: WorkerId
    unit: UnitName
    keys: Annotated[dict[KeyName, KeyValue], Meta(max_length=MAX_UNIT_KEYS)]


class UnitPosted(Struct, frozen=True, kw_only=True, tag="UnitPosted"):
    """Keys that another worker of the unit has posted."""

    unit: UnitName
    keys: Annotated[dict[KeyName, KeyValue], Meta(max_length=MAX_UNIT_KEYS)]


#: from a worker, and to it
UnitWord = JoinUnit | UnitPost
UnitAnswer = UnitAwaits | UnitFormed | UnitRefused | UnitPosted
