"""A model that is distributed over a replica group: its mesh, and checks that it is distributed completely."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from holdfast.protocol.layouts.layout import WHOLE
from holdfast.protocol.layouts.layout_list import Layouts
from holdfast.protocol.plan import Role
from holdfast.runtime.dtensor.replica_position import ReplicaPosition
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.session.replica_group.forming import ReplicaGroup
from holdfast.runtime.session.replica_group.replicated_state import check_replicated
from holdfast.runtime.state.refusals import check_wrappers
from holdfast.runtime.state.state import TrainingState
from holdfast.runtime.warm_up.planned_optimizer_steps import dry_run_steps

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SpreadModel:
    """The replica as torch sees it. Other replicas are hidden."""

    def __init__(self, replica_group: ReplicaGroup | None, device: torch.device, layouts: Layouts = ()) -> None:
        """Create the mesh. Without a replica group it has one rank, and all sizes of a layout count as 1.

        Args:
            layouts: all layouts of the script, if there are several.
        """
        from holdfast.runtime.layouts.mesh import ReplicaMesh  # torch's meshes take a second to import

        layout, place = (replica_group.layout, replica_group.local_rank) if replica_group is not None else (WHOLE, 0)
        #: which part of the model this rank holds
        self.place = ReplicaPosition(layout=layout, local_rank=place, has_layout=True, layouts=layouts)
        self._replica = ReplicaMesh(layout, Role(place=place), device)
        self._groups: Mapping[str, Communicator] = replica_group.groups if replica_group is not None else {}
        if replica_group is not None:
            self._replica.swap(replica_group.groups)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh, with the dimensions "shard" and "tensor"."""
        return self._replica.mesh

    def rename_dimensions(self, dimensions: Mapping[str, str]) -> DeviceMesh:
        """Return the same ranks under other names (see `ReplicaMesh.rename_dimensions`)."""
        return self._replica.rename_dimensions(dimensions)

    def configure_model(self, model: object) -> ReplicaPosition:
        """Check that a model is distributed as the layout says, and configure it; other objects are refused later.

        FSDP2 then sums gradients without a division, and ranks with the same samples split the tokens of the experts
        between them.

        Returns:
            Which part of the model this rank holds.

        Raises:
            BadInputError: the model is distributed over another mesh, or incompletely; or it is wrapped.
        """
        from holdfast.runtime.layouts.sharded import (
            check_boxes,
            check_spread,
            disable_gradient_division,
            share_expert_tokens,
        )

        if isinstance(model, torch.nn.Module):  # other types are refused later
            check_wrappers(model, has_layout=True)  # first, because what wrappers contain is not sharded
            check_spread(model, self._replica)
            check_boxes(model, self.place)
            disable_gradient_division(model)
            share_expert_tokens(model, self._replica)
        return self.place

    def prepare(self, state: TrainingState) -> None:
        """Check that replicated state is equal on all ranks, and let torch plan the first optimizer step in advance.

        The optimizers' steps run on tensors without memory, so nothing changes.

        Raises:
            BadInputError: a tensor that is not sharded differs between ranks.
        """
        check_replicated(state, self._groups.values())
        dry_run_steps(state.optimizers)
