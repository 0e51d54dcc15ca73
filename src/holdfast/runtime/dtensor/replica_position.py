"""The position of a worker in its replica group: its part of the model, and its samples of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.layout_list import Layouts
from holdfast.runtime.dtensor.local import is_counted_here


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPosition:
    """A local rank of a replica group, in a layout (docs/layouts.md)."""

    layout: Layout = WHOLE
    #: local rank in the replica group, 0-based
    local_rank: int = 0
    #: whether the script has asked for a layout
    has_layout: bool = False
    #: all layouts that the script lists, if there are several
    layouts: Layouts = ()

    @property
    def shard(self) -> int:
        """The part of a micro-batch's samples that this local rank computes."""
        return self.layout.shard_of(self.local_rank)

    @property
    def tensor(self) -> int:
        """The part of each matrix product that this local rank computes; all parts use the same samples."""
        return self.layout.tensor_of(self.local_rank)

    def is_counted_here(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter's local part counts on this local rank, in a sum over all of them."""
        return is_counted_here(parameter, self.layout.coordinates(self.local_rank))

    def role_position(self, rank: int, world: int) -> tuple[int, int]:
        """Return a rank's 0-based position among the members of its role, and the number of these members."""
        return rank // self.layout.places, world // self.layout.places

    def role_ranks(self, world: int) -> range:
        """Return the ranks of the members of this role; empty if the world does not consist of complete groups."""
        return range(self.local_rank, world if world % self.layout.places == 0 else 0, self.layout.places)


#: this worker has a whole replica
WHOLE_REPLICA = ReplicaPosition()
