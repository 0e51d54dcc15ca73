"""How one replica of a model is spread over roles (stage, place in the node), and which places belong together."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from holdfast.errors import BadInputError

#: the dimensions of a node's places, the slowest first: neighbours share a tensor
SHARD, TENSOR = "shard", "tensor"
DIMENSIONS = (SHARD, TENSOR)
#: of one dimension
MAX_SIZE = 1 << 16


class Layout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Over how many workers one replica is spread. Shards and tensors stay within a node; stages span nodes.

    `shard`: ranks that share parameters and optimizer state out (FSDP2). `tensor`: ranks that share each layer's
    computation out (tensor parallelism). `stages`: of a pipeline.
    """

    shard: int = 1
    tensor: int = 1
    stages: int = 1

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            # (what the user gives is not what the types say)
            size: Any = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_SIZE:
                raise BadInputError(
                    f"Layout({name}={size!r}): over how many workers a replica is spread is a whole number from 1 to "
                    f"{MAX_SIZE}; leave {name} out where it is not spread"
                )

    def __str__(self) -> str:
        said = [f"{name}={getattr(self, name)}" for name in self.__struct_fields__ if getattr(self, name) != 1]
        return f"Layout({', '.join(said)})"

    @property
    def places(self) -> int:
        """How many workers a node has: one for each part of a stage."""
        return self.shard * self.tensor

    @property
    def roles(self) -> int:
        """How many workers a replica has."""
        return self.stages * self.places

    @property
    def sizes(self) -> dict[str, int]:
        """By the names of the dimensions of a node's places."""
        return {SHARD: self.shard, TENSOR: self.tensor}

    def check_node(self, workers_per_node: int) -> None:
        """Look whether a node has a worker for each place.

        Raises:
            BadInputError: it has more, or fewer.
        """
        if workers_per_node != self.places:
            spread = " x ".join(f"{name}={size}" for name, size in self.sizes.items() if size != 1) or "one worker"
            raise BadInputError(
                f"{self} does not fit --workers-per-node {workers_per_node}: shards and tensors stay within a node, "
                f"and {spread} is {self.places} on each node; start the job with --workers-per-node {self.places}"
            )

    def rank(self, stage: int, place: int) -> int:
        """Return a role's rank within the replica: places first, then stages."""
        if not (0 <= stage < self.stages and 0 <= place < self.places):
            raise ValueError(f"{self} has no stage {stage} with a place {place}")
        return stage * self.places + place

    def stage_and_place(self, rank: int) -> tuple[int, int]:
        """Return which role has a rank within the replica."""
        if not 0 <= rank < self.roles:
            raise ValueError(f"rank {rank} is outside a replica of {self.roles}")
        return divmod(rank, self.places)

    def coordinates(self, place: int) -> dict[str, int]:
        """Return where a place lies along each dimension."""
        return {SHARD: place // self.tensor, TENSOR: place % self.tensor}

    def beside(self, place: int, dimension: str) -> tuple[int, ...]:
        """Return the places that differ from this one along a dimension alone, with itself, in their order."""
        stride = math.prod(self.sizes[later] for later in DIMENSIONS[DIMENSIONS.index(dimension) + 1 :])
        first = place - self.coordinates(place)[dimension] * stride
        return tuple(first + stride * number for number in range(self.sizes[dimension]))
