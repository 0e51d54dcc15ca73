"""How one replica of the model is spread over the processes of a node: the public `holdfast.Layout`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast.errors import BadInputError
from holdfast.protocol.plan import Role

#: along each dimension
MAX_SIZE = 1024
Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)]


class Layout(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One replica's dimensions (docs/layouts.md): within a node `shard` x `tensor` places, and `stages` of a pipeline.

    shard: FSDP2: so many places share the parameters of each module, and the samples of each micro-batch. tensor: so
    many share each matrix product, on the same samples. Places are numbered with `tensor` running fastest.
    """

    shard: Size = 1
    tensor: Size = 1
    stages: Size = 1

    def __post_init__(self) -> None:
        """Look at the sizes.

        Raises:
            BadInputError: one is no number from 1 to 1024.
        """
        for name, size in (("shard", self.shard), ("tensor", self.tensor), ("stages", self.stages)):
            if type(size) is not int or not 1 <= size <= MAX_SIZE:
                raise BadInputError(f"Layout({name}={size!r}): give a whole number from 1 to {MAX_SIZE}")

    @property
    def places(self) -> int:
        """How many processes of a node are one replica of the model (of a stage of it)."""
        return self.shard * self.tensor

    def role_of(self, index: int) -> Role:
        """Return the role of the worker with this index on its node."""
        return Role(place=index % self.places)

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
