"""Fetches a worker's micro-batches, and brings them to its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from holdfast.runtime.data.datasets import job_data
from holdfast.runtime.data.randomness import seed_fetch
from holdfast.runtime.data.sampling import StepSizes
from holdfast.runtime.data.torch_loader import DataOptions, take_apart


class MicroBatchLoader:
    """Fetches the micro-batches of a job's data and moves them to the device."""

    def __init__(
        self,
        data: Any,
        *,
        device: torch.device,
        seed: int,
        global_batch: int,
        micro_batch: int,
        options: DataOptions | None = None,
    ) -> None:
        """Look at the data and fix the order.

        Raises:
            BadInputError: the data cannot be used as they are, or a number is wrong (`StepSizes`).
        """
        sizes = StepSizes(seed=seed, global_batch=global_batch, micro_batch=micro_batch)
        dataset, self.options, self.difference = take_apart(data, options or DataOptions(), micro_batch)
        self._data = job_data(dataset, self.options.collate, sizes)
        self.device = device

    @property
    def order(self) -> StepSizes:
        """How many samples a step has; where they have numbers, a `SampleOrder`."""
        return self._data.order

    def load(self, step: int, micro_batch: int) -> Any:
        """Return the collated micro-batch on the device."""
        wanted = self._data.wanted(step, micro_batch)
        seed_fetch(self.order.seed, step, micro_batch, devices=True)
        return to_device(self._data.fetch(step, micro_batch, wanted), self.device)


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
