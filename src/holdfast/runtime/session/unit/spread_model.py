"""A model that is spread over the places of a unit: the mesh that it is spread over, and whether all of it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from holdfast.protocol.layouts.layout import WHOLE
from holdfast.protocol.layouts.several import Layouts
from holdfast.protocol.plan import Role
from holdfast.runtime.dtensor.place import ReplicaPosition
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.session.unit.alike import check_replicated
from holdfast.runtime.session.unit.unit import ReplicaGroup
from holdfast.runtime.state.refusals import check_wrappers
from holdfast.runtime.state.state import TrainingState
from holdfast.runtime.warming.spread_steps import dry_run_steps

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SpreadModel:
    """What torch is shown of the unit: one replica, and nothing of the others."""

    def __init__(self, unit: ReplicaGroup | None, device: torch.device, layouts: Layouts = ()) -> None:
        """Make the mesh; without a unit, that of one place: a layout's sizes count as 1.

        Args:
            layouts: all that the script lists, where these are several.
        """
        from holdfast.runtime.layouts.mesh import ReplicaMesh  # (torch's meshes take a second to import)

        layout, place = (unit.layout, unit.place) if unit is not None else (WHOLE, 0)
        #: which part of the model is here
        self.place = ReplicaPosition(layout=layout, local_rank=place, has_layout=True, layouts=layouts)
        self._replica = ReplicaMesh(layout, Role(place=place), device)
        self._groups: Mapping[str, Communicator] = unit.groups if unit is not None else {}
        if unit is not None:
            self._replica.swap(unit.groups)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh, with the dimensions "shard" and "tensor"."""
        return self._replica.mesh

    def rename_dimensions(self, dimensions: Mapping[str, str]) -> DeviceMesh:
        """Return the same places under other names (`ReplicaMesh.named`)."""
        return self._replica.rename_dimensions(dimensions)

    def configure_model(self, model: object) -> ReplicaPosition:
        """Look whether a model is spread as the layout says, and have FSDP2 add gradients up and divide by nothing,
        and places with the same samples share the experts' tokens out.

        Returns:
            Which part of it is here.

        Raises:
            BadInputError: it is spread over another mesh, or not all of it is; or it is wrapped.
        """
        from holdfast.runtime.layouts.sharded import (
            check_boxes,
            check_spread,
            disable_gradient_division,
            share_expert_tokens,
        )

        if isinstance(model, torch.nn.Module):  # (what else it may be is complained of where models are looked at)
            check_wrappers(model, spread=True)  # (first: what they wrap is not sharded because of them)
            check_spread(model, self._replica)
            check_boxes(model, self.place)
            disable_gradient_division(model)
            share_expert_tokens(model, self._replica)
        return self.place

    def prepare(self, state: TrainingState) -> None:
        """All that is trained is known: see whether it is the same where it should be, and foresee its first step.

        Raises:
            BadInputError: places of the unit have different copies of something that is not spread over them.
        """
        check_replicated(state, self._groups.values())
        dry_run_steps(state.optimizers)
