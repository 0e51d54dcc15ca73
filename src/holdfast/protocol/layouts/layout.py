"""How one replica of the model is spread over the processes of a node: the public `holdfast.Layout`."""

from __future__ import annotations

import difflib
import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.errors import BadInputError
from holdfast.protocol.plan import WHOLE_REPLICA, Role

#: the dimensions of a node's places, the slowest first: neighbours share a tensor
SHARD, TENSOR = "shard", "tensor"
DIMENSIONS = (SHARD, TENSOR)
#: along each dimension
MAX_SIZE = 1024
Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)]


class _Sized(msgspec.StructMeta):
    """Looks at the names that a script gives: msgspec's own complaint is a TypeError that names no other."""

    def __call__(cls, *args: Any, **sizes: Any) -> Any:
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

    @property
    def roles(self) -> int:
        """How many workers a replica has, of all its stages."""
        return self.stages * self.places

    @property
    def sizes(self) -> dict[str, int]:
        """By the names of the dimensions of a node's places."""
        return {SHARD: self.shard, TENSOR: self.tensor}

    def rank(self, stage: int, place: int) -> int:
        """Return a role's rank within the replica, as torch sees it: places first, then stages.

        Raises:
            ValueError: there is no such role.
        """
        if not (0 <= stage < self.stages and 0 <= place < self.places):
            raise ValueError(f"a replica of {self} has no stage {stage} with a place {place}")
        return stage * self.places + place

    def coordinates(self, place: int) -> dict[str, int]:
        """Return where a place lies along each dimension."""
        return {SHARD: self.shard_of(place), TENSOR: self.tensor_of(place)}

    def beside(self, place: int, dimension: str) -> tuple[int, ...]:
        """Return the places that differ from this one along a dimension alone, with itself, in their order."""
        stride = math.prod(self.sizes[later] for later in DIMENSIONS[DIMENSIONS.index(dimension) + 1 :])
        first = place - place // stride % self.sizes[dimension] * stride
        return tuple(first + stride * number for number in range(self.sizes[dimension]))

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
