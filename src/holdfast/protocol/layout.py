"""How one replica of the model is spread over the processes of a node: the public `holdfast.Layout`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.protocol.plan import WHOLE_REPLICA, Role

#: along each dimension
Size = Annotated[int, Meta(ge=1, le=1024)]


class Layout(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One replica's dimensions (docs/layouts.md): within a node `shard` x `tensor` places, and `stages` of a pipeline.

    shard: FSDP2: so many places share the parameters of each module, and the samples of each micro-batch. tensor: so
    many share each matrix product, on the same samples. Places are numbered with `tensor` running fastest.
    """

    shard: Size = 1
    tensor: Size = 1
    stages: Size = 1

    @property
    def places(self) -> int:
        """How many processes of a node are one replica of the model (of a stage of it)."""
        return self.shard * self.tensor

    def role_of(self, index: int) -> Role:
        """Return the role of the worker with this index on its node."""
        place = index % self.places
        return Role(place=place) if place else WHOLE_REPLICA  # (which takes no room in messages)

    def shard_of(self, place: int) -> int:
        """Return which part of a micro-batch's samples a place has, 0-based: the same along `tensor`."""
        return place // self.tensor

    def tensor_of(self, place: int) -> int:
        """Return which part of each matrix product a place has, 0-based."""
        return place % self.tensor

    def __str__(self) -> str:
        """As people would say it."""
        named = {"shard": self.shard, "tensor": self.tensor, "stages": self.stages}
        return " x ".join(f"{name} {size}" for name, size in named.items() if size > 1) or "a whole replica per worker"


#: each worker has a whole replica
WHOLE = Layout()


def hash_of_role(place: int, state_hash: str) -> str:
    """Return how the hash of a part of the state is told: those of different places are of different parts."""
    return f"{place}:{state_hash}"


def of_one_role(one: str, other: str) -> bool:
    """Tell whether two hashes, as they were told, are of the same part of the state."""
    return one.rpartition(":")[0] == other.rpartition(":")[0]
