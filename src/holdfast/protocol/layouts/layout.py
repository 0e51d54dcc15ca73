"""How the processes of a node share one replica of the model: the public `holdfast.Layout`."""

from __future__ import annotations

import difflib
import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.errors import BadInputError
from holdfast.protocol.plan import WHOLE_REPLICA, Role

#: The dimensions of a replica group within a node, the slowest first: neighbours share a tensor.
SHARD, TENSOR = "shard", "tensor"
DIMENSIONS = (SHARD, TENSOR)
#: most workers along a dimension
MAX_SIZE = 1024
Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)]


class _Sized(msgspec.StructMeta):
    """Checks the names of arguments. The TypeError of msgspec suggests no other name."""

    def __call__(cls, *args: Any, **sizes: Any) -> Any:
        """Make a layout; raise `BadInputError` for an unknown name, naming the nearest one, or too many arguments."""
        known = cls.__struct_fields__
        for name in sizes:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise BadInputError(
                    f"Layout({name}={sizes[name]!r}): {name} is not known; the nearest one is {nearest}"
                )
        if len(args) > len(known):
            raise BadInputError(f"Layout{args!r}: give no more than {', '.join(known)}")
        return super().__call__(*args, **sizes)


class Layout(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, metaclass=_Sized):
    """The dimensions of one replica (docs/layouts.md): `shard` x `tensor` workers of a node, in `stages` of a pipeline.

    Local ranks are numbered with `tensor` running fastest.
    """

    #: FSDP2: this many workers share the parameters of each module, and the samples of each micro-batch
    shard: Size = 1
    #: this many workers share each matrix product, on the same samples
    tensor: Size = 1
    #: stages of a pipeline
    stages: Size = 1

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            BadInputError: one is not a whole number from 1 to 1024.
        """
        for name, size in (("shard", self.shard), ("tensor", self.tensor), ("stages", self.stages)):
            if type(size) is not int or not 1 <= size <= MAX_SIZE:
                raise BadInputError(f"Layout({name}={size!r}): give a whole number from 1 to {MAX_SIZE}")

    @property
    def places(self) -> int:
        """Number of processes of a node that share one replica of the model, or of a stage."""
        return self.shard * self.tensor

    @property
    def roles(self) -> int:
        """Number of workers of a replica, in all stages."""
        return self.stages * self.places

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension within a node, by name."""
        return {SHARD: self.shard, TENSOR: self.tensor}

    def rank(self, stage: int, place: int) -> int:
        """Return the rank of a role within the replica: local ranks first, then stages.

        Raises:
            ValueError: the role does not exist.
        """
        if not (0 <= stage < self.stages and 0 <= place < self.places):
            raise ValueError(f"a replica of {self} has no stage {stage} with a place {place}")
        return stage * self.places + place

    def coordinates(self, place: int) -> dict[str, int]:
        """Return the coordinate of a local rank along each dimension."""
        return {SHARD: self.shard_of(place), TENSOR: self.tensor_of(place)}

    def ranks_along(self, place: int, dimension: str) -> tuple[int, ...]:
        """Return the local ranks that differ from this one only along one dimension, including itself, ascending."""
        stride = math.prod(self.sizes[later] for later in DIMENSIONS[DIMENSIONS.index(dimension) + 1 :])
        first = place - place // stride % self.sizes[dimension] * stride
        return tuple(first + stride * number for number in range(self.sizes[dimension]))

    def role_of(self, index: int) -> Role:
        """Return the role of the worker with this index on its node."""
        place = index % self.places
        return Role(place=place) if place else WHOLE_REPLICA  # Messages leave this object out.

    def shard_of(self, place: int) -> int:
        """Return the part of a micro-batch's samples that a local rank has, 0-based; equal along `tensor`."""
        return place // self.tensor

    def tensor_of(self, place: int) -> int:
        """Return the part of each matrix product that a local rank has, 0-based."""
        return place % self.tensor

    def __str__(self) -> str:
        """The layout in words."""
        named = {"shard": self.shard, "tensor": self.tensor, "stages": self.stages}
        return " x ".join(f"{name} {size}" for name, size in named.items() if size > 1) or "a whole replica per worker"


#: Each worker has a whole replica.
WHOLE = Layout()


def hash_of_role(place: int, state_hash: str) -> str:
    """Return the hash of a part of the state with its local rank: other local ranks have other parts."""
    return f"{place}:{state_hash}"


def are_of_same_role(one: str, other: str) -> bool:
    """Return whether two results of `hash_of_role` are of the same part of the state."""
    return one.rpartition(":")[0] == other.rpartition(":")[0]
