"""Which samples form a micro-batch: a pure function of (seed, data set's length, global batch, step, micro-batch).

All passes over the data set are laid end to end as one sequence, each pass in an order of its own; step s takes the
s-th global batch of it. So no membership, no failure and no restart changes what a step is made of, and every pass
has each sample exactly once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset

from holdfast.errors import BadInputError
from holdfast.runtime.tensors import collate as default_collate
from holdfast.step_samples import MAX_MICRO_BATCHES

#: A step spans two passes at most where the data set is larger than the global batch.
_KEPT_PASSES = 2


class SampleOrder:
    """The order in which a job uses its samples."""

    def __init__(self, *, seed: int, length: int, global_batch: int, micro_batch: int) -> None:
        """Fix the order.

        Args:
            seed: any int.
            length: samples in the data set.
            global_batch, micro_batch: samples per step and per micro-batch.

        Raises:
            BadInputError: a number is out of range, or the global batch is no multiple of the micro-batch.
        """
        for name, number in (("seed", seed), ("global_batch", global_batch), ("micro_batch", micro_batch)):
            if not isinstance(cast(object, number), int):
                raise BadInputError(f"{name} is {number!r}: it must be a whole number")
        if length < 1:
            raise BadInputError("the data set is empty: it needs at least one sample")
        if micro_batch < 1 or global_batch < 1:
            raise BadInputError(
                f"global_batch is {global_batch} and micro_batch is {micro_batch}: both must be at least 1"
            )
        if global_batch % micro_batch:
            raise BadInputError(
                f"global_batch is {global_batch} and micro_batch is {micro_batch}: "
                "the global batch must be a multiple of the micro-batch"
            )
        if global_batch // micro_batch > MAX_MICRO_BATCHES:
            raise BadInputError(
                f"global_batch is {global_batch} and micro_batch is {micro_batch}: a step may have up to "
                f"{MAX_MICRO_BATCHES} micro-batches"
            )
        self.seed = seed
        self.length = length
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self._passes: OrderedDict[int, np.ndarray] = OrderedDict()

    @property
    def micro_batches(self) -> int:
        """M: micro-batches per step."""
        return self.global_batch // self.micro_batch

    def indices(self, step: int, micro_batch: int) -> list[int]:
        """Return the samples of one micro-batch of a step; steps count from 1, micro-batches from 0.

        Raises:
            ValueError: there is no such step or micro-batch.
        """
        if step < 1 or not 0 <= micro_batch < self.micro_batches:
            raise ValueError(f"there is no micro-batch {micro_batch} of step {step}")
        start = (step - 1) * self.global_batch + micro_batch * self.micro_batch
        return [self.sample(place) for place in range(start, start + self.micro_batch)]

    def sample(self, place: int) -> int:
        """Return the sample at a place of the endless sequence."""
        number, offset = divmod(place, self.length)
        return int(self._pass(number)[offset])

    def _pass(self, number: int) -> np.ndarray:
        order = self._passes.get(number)
        if order is None:
            # Philox is counter-based: the key alone names the stream, whatever was drawn before.
            key = np.array([self.seed % (1 << 64), number], dtype=np.uint64)
            order = np.random.Generator(np.random.Philox(key=key)).permutation(self.length)
            self._passes[number] = order
            while len(self._passes) > _KEPT_PASSES:
                self._passes.popitem(last=False)
        return order


class MicroBatchLoader:
    """Fetches micro-batches of a map-style data set and moves them to the device."""

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device,
        seed: int,
        global_batch: int,
        micro_batch: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Check the data set and fix the order.

        Raises:
            BadInputError: the data set is not map-style, or a number is wrong (`SampleOrder`).
        """
        mapped = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        kind = type(dataset).__name__
        if isinstance(dataset, IterableDataset) or not mapped:
            raise BadInputError(
                f"the data set is a {kind}: holdfast needs a map-style one, with __len__ and "
                "__getitem__, so that every sample can be counted exactly once"
            )
        self._dataset = dataset
        self.device = device
        self._collate: Callable[[list[Any]], Any] = default_collate if collate is None else collate
        self.order = SampleOrder(seed=seed, length=len(dataset), global_batch=global_batch, micro_batch=micro_batch)

    def load(self, step: int, micro_batch: int) -> Any:
        """Return the collated micro-batch on the device."""
        indices = self.order.indices(step, micro_batch)
        fetch = getattr(self._dataset, "__getitems__", None)
        fetched: Any = fetch(indices) if callable(fetch) else [self._dataset[index] for index in indices]
        return to_device(self._collate(list(fetched)), self.device)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors inside nested lists, tuples and mappings; leave everything else as it is."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in cast(dict[Any, Any], batch).items()}
    if isinstance(batch, list | tuple):
        values = cast(Sequence[Any], batch)
        moved, make = [to_device(value, device) for value in values], cast(Callable[..., Any], type(values))
        return make(*moved) if hasattr(values, "_fields") else make(moved)
    return batch
