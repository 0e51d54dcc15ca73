"""The groups and the mesh of one worker's replica, which torch's objects keep while generations come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from holdfast.protocol.layouts.layout import DIMENSIONS, Layout
from holdfast.protocol.plan import Role
from holdfast.runtime.groups.communicator import CollectiveLeftError, Communicator, LocalCommunicator
from holdfast.runtime.layouts.default_group import DefaultGroup
from holdfast.runtime.layouts.outer_group import OuterGroup
from holdfast.runtime.layouts.registered import register, register_default, unregister

_DeviceMesh: Any = DeviceMesh


class ReplicaMesh:
    """One replica as torch sees it: a default group that connects nobody, and one outer group for each dimension."""

    def __init__(self, layout: Layout, role: Role, device: torch.device) -> None:
        """Register the groups and make the mesh; a dimension of one is ready, the others wait for `swap`.

        Raises:
            BadInputError: torch has a default process group.
        """
        self.layout = layout
        self.role = role
        first = layout.rank(role.stage, 0)
        self._default = DefaultGroup(layout.rank(role.stage, role.place), layout.roles)
        register_default(self._default)
        self.groups: dict[str, OuterGroup] = {}
        for dimension in DIMENSIONS:
            members = layout.beside(role.place, dimension)
            group = OuterGroup(f"holdfast-{dimension}", members.index(role.place), len(members))
            if len(members) == 1:
                group.swap(LocalCommunicator())
            register(group, [first + place for place in members])
            self.groups[dimension] = group
        places = torch.arange(first, first + layout.places, dtype=torch.int).view(layout.shard, layout.tensor)
        #: with the dimensions "shard" and "tensor", sizes of one included: `mesh["shard"]`
        self.mesh: DeviceMesh = _DeviceMesh.from_group(
            list(self.groups.values()), device.type, mesh=places, mesh_dim_names=DIMENSIONS
        )

    @property
    def wanted(self) -> dict[str, tuple[int, ...]]:
        """For each dimension that is more than one: the places in a node whose workers are to be connected."""
        places = {dimension: self.layout.beside(self.role.place, dimension) for dimension in DIMENSIONS}
        return {dimension: members for dimension, members in places.items() if len(members) > 1}

    @property
    def left(self) -> CollectiveLeftError | None:
        """Why the groups cannot be used until the next `swap`; None where they can."""
        return next((group.left for group in self.groups.values() if group.left is not None), None)

    def swap(self, communicators: Mapping[str, Communicator], *, sever: bool = True) -> None:
        """Put the groups on new communicators, one for each dimension in `wanted`; the old ones are retired."""
        if communicators.keys() != self.wanted.keys():
            raise ValueError(f"communicators for {sorted(communicators)}, and {sorted(self.wanted)} are wanted")
        for dimension, communicator in communicators.items():
            self.groups[dimension].swap(communicator, sever=sever)

    def give_up(self, *, sever: bool = True) -> None:
        """Retire the communicators; whatever is called on the groups raises until the next `swap`."""
        for dimension in self.wanted:
            self.groups[dimension].give_up(sever=sever)

    def close(self) -> None:
        """Retire the communicators and let torch forget the groups."""
        for group in self.groups.values():
            group.give_up(sever=False)
            unregister(group)
        unregister(self._default)
