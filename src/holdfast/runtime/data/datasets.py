"""The kinds of data that a job may have, each as what the worker knows of a micro-batch, and what fetches it.

The worker says which samples a micro-batch has, and keeps what goes with them from step to step; fetching needs nothing
but that, so it can be done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from holdfast.errors import BadInputError
from holdfast.runtime.data.sampling import SampleOrder, StepSizes
from holdfast.runtime.data.torch_loader import Collate, is_stream
from holdfast.runtime.tensors import collate as default_collate

#: makes a micro-batch, on the host, of (step, micro-batch, what is wanted of it)
Fetch = Callable[[int, int, Any], Any]


class JobData(Protocol):
    """What a job is trained on."""

    @property
    def order(self) -> StepSizes:
        """How many samples a step has, of which order where they have numbers."""
        ...

    @property
    def fetch(self) -> Fetch:
        """What makes its micro-batches; may be pickled, and used by another process."""
        ...

    def wanted(self, step: int, micro_batch: int) -> Any:
        """Return what `fetch` needs to know beside the numbers.

        Raises:
            ValueError: there is no such step or micro-batch.
        """
        ...


class FetchSamples:
    """Fetches samples by their numbers."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self._dataset = dataset
        self._collate = default_collate if collate is None else collate

    def __call__(self, step: int, micro_batch: int, indices: list[int]) -> Any:
        fetch = getattr(self._dataset, "__getitems__", None)
        fetched: Any = fetch(indices) if callable(fetch) else [self._dataset[index] for index in indices]
        return self._collate(list(fetched))


class MappedData:
    """A data set that has its samples by number."""

    def __init__(self, dataset: Any, collate: Collate | None, sizes: StepSizes) -> None:
        """Take a data set with `__len__` and `__getitem__` (or `__getitems__`).

        Raises:
            BadInputError: it is empty.
        """
        self.order: SampleOrder = SampleOrder(
            seed=sizes.seed, length=len(dataset), global_batch=sizes.global_batch, micro_batch=sizes.micro_batch
        )
        self.fetch: Fetch = FetchSamples(dataset, collate)

    def wanted(self, step: int, micro_batch: int) -> list[int]:
        """Return the numbers of its samples."""
        return self.order.indices(step, micro_batch)


def job_data(data: Any, collate: Collate | None, sizes: StepSizes) -> JobData:
    """Return what a script's data are.

    Raises:
        BadInputError: they cannot be used.
    """
    if is_stream(data) or not hasattr(data, "__len__"):
        raise BadInputError(
            f"the data set is a {type(data).__name__}: holdfast needs a map-style one, with __len__ and "
            "__getitem__, so that every sample can be counted exactly once"
        )
    return MappedData(data, collate, sizes)
