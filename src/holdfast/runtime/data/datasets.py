"""The kinds of data that a job can have. Each kind has a part in the worker, and a function that fetches.

The worker decides which samples a micro-batch has, and keeps the state between steps. Fetching needs only the
`fetch_argument`, so it can run in another process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from holdfast.errors import BadInputError
from holdfast.runtime.data.sampling import SampleOrder, StepSizes
from holdfast.runtime.data.torch_loader import Collate
from holdfast.runtime.tensors import collate as default_collate

#: makes a micro-batch on the host, given step, micro-batch and `fetch_argument`
Fetch = Callable[[int, int, Any], Any]


class Stream(Protocol):
    """Data that are generated: the script's own function of step and micro-batch."""

    def batch(self, step: int, micro_batch: int) -> Any:
        """Return a micro-batch. It must be the same on every worker, at any time.

        Args:
            step: from 1.
            micro_batch: from 0, below global_batch / micro_batch of `protect`.
        """
        ...


class JobData:
    """The training data of a job. This base class: micro-batches that are functions of their numbers alone."""

    #: whether `fetch_argument` is a list of sample indices, so that a part of it can be fetched alone
    has_indices = False

    def __init__(self, order: StepSizes, fetch: Fetch, *, keep_apart: bool = False) -> None:
        """Create the data.

        Args:
            order: how many samples a step has, and their order if they have indices.
            fetch: makes micro-batches; it is pickled for loader workers.
            keep_apart: whether one loader worker fetches the same micro-batch of all steps.
        """
        self.order = order
        self.fetch = fetch
        self.keep_apart = keep_apart

    def fetch_argument(self, step: int, micro_batch: int) -> Any:
        """Return the third argument of `fetch`, for a micro-batch that exists."""
        return None

    def on_fetched(self, step: int, micro_batch: int, fetched: Any) -> Any:
        """Return the micro-batch of a fetch's result, before it is computed."""
        return fetched


class SampleFetcher:
    """Fetches samples by their indices."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self._dataset = dataset
        self._collate = default_collate if collate is None else collate

    def __call__(self, step: int, micro_batch: int, indices: list[int]) -> Any:
        """Return the collated samples, fetched all at once if the data set has `__getitems__`."""
        fetch = getattr(self._dataset, "__getitems__", None)
        fetched: Any = fetch(indices) if callable(fetch) else [self._dataset[index] for index in indices]
        return self._collate(list(fetched))


class MappedData(JobData):
    """A data set with indices."""

    has_indices = True

    def __init__(self, dataset: Any, collate: Collate | None, sizes: StepSizes) -> None:
        """Use a data set with `__len__` and `__getitem__` (or `__getitems__`).

        Raises:
            BadInputError: it is empty.
        """
        self._samples = sizes.make_order(len(dataset))
        super().__init__(self._samples, SampleFetcher(dataset, collate))

    def fetch_argument(self, step: int, micro_batch: int) -> list[int]:
        """Return the indices of its samples."""
        return self._samples.indices(step, micro_batch)


class BatchFetcher:
    """Gets micro-batches from a `Stream`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __call__(self, step: int, micro_batch: int, _: None) -> Any:
        return self._stream.batch(step, micro_batch)


class CurriculumFetcher:
    """Fetches samples by their indices from the data set of a step."""

    def __init__(self, dataset_of: Callable[[int], Any], collate: Collate | None) -> None:
        self._dataset_of = dataset_of
        self._collate = collate

    def __call__(self, step: int, micro_batch: int, indices: list[int]) -> Any:
        return SampleFetcher(self._dataset_of(step), self._collate)(step, micro_batch, indices)


class CurriculumData(JobData):
    """One data set per step, given by a function of the step. Each has indices."""

    has_indices = True

    def __init__(self, dataset_of: Callable[[int], Any], collate: Collate | None, sizes: StepSizes) -> None:
        super().__init__(sizes, CurriculumFetcher(dataset_of, collate))
        self._dataset_of = dataset_of
        self._newest: SampleOrder | None = None

    def fetch_argument(self, step: int, micro_batch: int) -> list[int]:
        """Return the indices of a micro-batch's samples in the data set of its step, which the script's function
        returns. They follow from step, micro-batch and the length of that data set, so data sets of the same length
        continue one order.

        Raises:
            BadInputError: the step's data set has no indices, or is empty.
            ValueError: the micro-batch does not exist.
        """
        dataset = self._dataset_of(step)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise BadInputError(
                f"the data set of step {step} is a {type(dataset).__name__}: it needs __len__ and __getitem__"
            )
        if self._newest is None or self._newest.length != len(dataset):
            self._newest = self.order.make_order(len(dataset))
        return self._newest.indices(step, micro_batch)
