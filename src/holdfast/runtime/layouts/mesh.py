"""The process groups and the mesh of one replica, which torch's objects keep across generations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from holdfast.errors import BadInputError
from holdfast.protocol.layouts.layout import DIMENSIONS, Layout
from holdfast.protocol.plan import Role
from holdfast.runtime.dtensor.local import GROUP
from holdfast.runtime.groups.communicator import CollectiveLeftError, Communicator, LocalCommunicator
from holdfast.runtime.layouts.default_group import DefaultGroup
from holdfast.runtime.layouts.outer_group import OuterGroup
from holdfast.runtime.layouts.registered import register, register_default, unregister

_DeviceMesh: Any = DeviceMesh


class ReplicaMesh:
    """One replica as torch sees it: a default group that refuses collectives, and one outer group per dimension."""

    def __init__(self, layout: Layout, role: Role, device: torch.device) -> None:
        """Register the groups and create the mesh. A dimension of size 1 is ready; the others wait for `swap`.

        Raises:
            BadInputError: torch already has a default process group.
        """
        self.layout = layout
        self.role = role
        first = layout.rank(role.stage, 0)
        self._default = DefaultGroup(layout.rank(role.stage, role.place), layout.roles)
        register_default(self._default)
        self.groups: dict[str, OuterGroup] = {}
        for dimension in DIMENSIONS:
            members = layout.ranks_along(role.place, dimension)
            group = OuterGroup(f"{GROUP}{dimension}", members.index(role.place), len(members))
            if len(members) == 1:
                group.swap(LocalCommunicator())
            register(group, [first + place for place in members])
            self.groups[dimension] = group
        #: a group of one rank, for dimensions that other libraries' meshes have in addition
        self._single = OuterGroup(f"{GROUP}single", 0, 1)
        self._single.swap(LocalCommunicator())
        register(self._single, [self._default.rank()])
        self._device_type = device.type
        #: with the dimensions "shard" and "tensor", even if their size is 1: `mesh["shard"]`
        self.mesh = self.rename_dimensions({dimension: dimension for dimension in DIMENSIONS})

    def rename_dimensions(self, dimensions: Mapping[str, str]) -> DeviceMesh:
        """Return a mesh of this rank's part of the replica with other names, and additional dimensions of size 1.
        Dimensions of the layout may be left out; the mesh then has the ranks with this rank's coordinate along them. It
        uses the same groups.

        Args:
            dimensions: for each name in the new mesh, the slowest first: a dimension of the layout, in their order; or
                "" for a dimension of size 1.

        Raises:
            BadInputError: `dimensions` is empty; a dimension of the layout is out of order, repeated or unknown; or a
                dimension has the name of another one of the layout.
        """
        of_layout = [dimension for dimension in dimensions.values() if dimension]
        misnamed = any(name in DIMENSIONS and name != of for name, of in dimensions.items())
        if not dimensions or misnamed or of_layout != [of for of in DIMENSIONS if of in of_layout]:
            raise BadInputError(
                f'job.mesh_as({", ".join(f"{name}={of!r}" for name, of in dimensions.items())}): give "shard", '
                '"tensor", or "" for a dimension of size 1; each once, "shard" before "tensor", and none under '
                "the other's name"
            )
        sizes = self.layout.sizes
        shape = [sizes[dimension] if dimension else 1 for dimension in dimensions.values()]
        here = self.layout.coordinates(self.role.place)
        index = tuple(slice(None) if dimension in of_layout else here[dimension] for dimension in DIMENSIONS)
        first = self.layout.rank(self.role.stage, 0)
        places = torch.arange(first, first + self.layout.places, dtype=torch.int).view(*sizes.values())
        groups = [self.groups[dimension] if dimension else self._single for dimension in dimensions.values()]
        return _DeviceMesh.from_group(
            groups, self._device_type, mesh=places[index].reshape(shape), mesh_dim_names=tuple(dimensions)
        )

    @property
    def connected_ranks(self) -> dict[str, tuple[int, ...]]:
        """For each dimension larger than 1: the local ranks to connect."""
        places = {dimension: self.layout.ranks_along(self.role.place, dimension) for dimension in DIMENSIONS}
        return {dimension: members for dimension, members in places.items() if len(members) > 1}

    @property
    def left_error(self) -> CollectiveLeftError | None:
        """Why the groups cannot be used until the next `swap`; None if they can."""
        return next((group.left_error for group in self.groups.values() if group.left_error is not None), None)

    def swap(self, communicators: Mapping[str, Communicator], *, sever: bool = True) -> None:
        """Move the groups to new communicators, one per dimension in `connected_ranks`, and retire their previous ones;
        collectives in progress on these are abandoned. Groups of one rank stay as they are.

        Args:
            sever: whether to break the previous ones' connections; False if peers may still finish their last
                operation.

        Raises:
            ValueError: the keys are not exactly these dimensions, or a communicator has another rank or size than its
                group, or is in use there already.
        """
        if communicators.keys() != self.connected_ranks.keys():
            raise ValueError(f"got communicators for {sorted(communicators)}, expected {sorted(self.connected_ranks)}")
        for dimension, communicator in communicators.items():
            self.groups[dimension].swap(communicator, sever=sever)

    def retire_communicators(self, *, sever: bool = True) -> None:
        """Retire the communicators of dimensions larger than 1. Collectives on their groups raise until the next
        `swap`.

        Args:
            sever: whether to break their connections, too.
        """
        for dimension in self.connected_ranks:
            self.groups[dimension].retire_communicator(sever=sever)

    def close(self) -> None:
        """Retire the communicators of all groups without breaking their connections, so that collectives raise; remove
        the groups, also torch's default group, from torch's tables.
        """
        for group in (*self.groups.values(), self._single):
            group.retire_communicator(sever=False)
            unregister(group)
        unregister(self._default)
