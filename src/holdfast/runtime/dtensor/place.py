"""Where a worker is within its unit: which part of the model it holds, and which samples of a micro-batch it has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.protocol.layouts.layout import WHOLE, Layout
from holdfast.protocol.layouts.several import Layouts
from holdfast.runtime.dtensor.local import is_counted_here


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPosition:
    """A place of a unit, 0-based, in a layout (docs/layouts.md); `spread`: the script has asked for a layout.

    `layouts`: all that it lists, where these are several.
    """

    layout: Layout = WHOLE
    local_rank: int = 0
    has_layout: bool = False
    layouts: Layouts = ()

    @property
    def shard(self) -> int:
        """Which part of a micro-batch's samples is computed here."""
        return self.layout.shard_of(self.local_rank)

    @property
    def tensor(self) -> int:
        """Which part of each matrix product is computed here; the samples are the same in all."""
        return self.layout.tensor_of(self.local_rank)

    def is_counted_here(self, parameter: torch.Tensor) -> bool:
        """Tell whether what is here of a parameter counts here, where all places of a unit are added up."""
        return is_counted_here(parameter, self.layout.coordinates(self.local_rank))

    def role_position(self, rank: int, world: int) -> tuple[int, int]:
        """Return which of the members of its own role a member with this rank is, 0-based, and how many those are."""
        return rank // self.layout.places, world // self.layout.places

    def role_ranks(self, world: int) -> range:
        """Return the ranks of the members of this role among so many; none where these are not whole units."""
        return range(self.local_rank, world if world % self.layout.places == 0 else 0, self.layout.places)


#: all of a replica is here
WHOLE_REPLICA = ReplicaPosition()
