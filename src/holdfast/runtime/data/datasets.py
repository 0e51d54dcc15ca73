"""The kinds of data that a job may have, each as what the worker knows of a micro-batch, and what fetches it.

The worker says which samples a micro-batch has, and keeps what goes with them from step to step; fetching needs nothing
but that, so it can be done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from holdfast.errors import BadInputError
from holdfast.runtime.data.sampling import SampleOrder, StepSizes
from holdfast.runtime.data.torch_loader import Collate
from holdfast.runtime.tensors import collate as default_collate

#: makes a micro-batch, on the host, of (step, micro-batch, what is wanted of it)
Fetch = Callable[[int, int, Any], Any]


class Stream(Protocol):
    """Data that are made, not looked up: the script's own function of step and micro-batch."""

    def batch(self, step: int, micro_batch: int) -> Any:
        """Return a micro-batch: the same one, whoever asks, whenever, and however often.

        Args:
            step: from 1. micro_batch: from 0, below global_batch / micro_batch of `protect`.
        """
        ...


class JobData:
    """What a job is trained on; here, data whose micro-batches are functions of their numbers alone.

    order: how many samples a step has, and of which order where they have numbers. fetch: makes its micro-batches; it
    is pickled to loader workers. keep_apart: the same micro-batch of all steps is always fetched in one place.
    """

    #: what is `wanted` of a micro-batch is the list of its samples' numbers: a part of it can be fetched alone
    has_indices = False

    def __init__(self, order: StepSizes, fetch: Fetch, *, keep_apart: bool = False) -> None:
        self.order = order
        self.fetch = fetch
        self.keep_apart = keep_apart

    def fetch_argument(self, step: int, micro_batch: int) -> Any:
        """Return what `fetch` needs to know beside the numbers, which are those of a micro-batch that there is."""
        return None

    def on_fetched(self, step: int, micro_batch: int, fetched: Any) -> Any:
        """A micro-batch is about to be computed: return it, of what was fetched."""
        return fetched


class SampleFetcher:
    """Fetches samples by their numbers."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self._dataset = dataset
        self._collate = default_collate if collate is None else collate

    def __call__(self, step: int, micro_batch: int, indices: list[int]) -> Any:
        fetch = getattr(self._dataset, "__getitems__", None)
        fetched: Any = fetch(indices) if callable(fetch) else [self._dataset[index] for index in indices]
        return self._collate(list(fetched))


class MappedData(JobData):
    """A data set that has its samples by number."""

    has_indices = True

    def __init__(self, dataset: Any, collate: Collate | None, sizes: StepSizes) -> None:
        """Take a data set with `__len__` and `__getitem__` (or `__getitems__`).

        Raises:
            BadInputError: it is empty.
        """
        self._samples = sizes.make_order(len(dataset))
        super().__init__(self._samples, SampleFetcher(dataset, collate))

    def fetch_argument(self, step: int, micro_batch: int) -> list[int]:
        """Return the numbers of its samples."""
        return self._samples.indices(step, micro_batch)


class BatchFetcher:
    """Asks a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __call__(self, step: int, micro_batch: int, _: None) -> Any:
        return self._stream.batch(step, micro_batch)


class CurriculumFetcher:
    """Fetches samples by their numbers, of the data set of a step."""

    def __init__(self, dataset_of: Callable[[int], Any], collate: Collate | None) -> None:
        self._dataset_of = dataset_of
        self._collate = collate

    def __call__(self, step: int, micro_batch: int, indices: list[int]) -> Any:
        return SampleFetcher(self._dataset_of(step), self._collate)(step, micro_batch, indices)


class CurriculumData(JobData):
    """A data set for each step, by a function of the step's number; each has its samples by number."""

    has_indices = True

    def __init__(self, dataset_of: Callable[[int], Any], collate: Collate | None, sizes: StepSizes) -> None:
        super().__init__(sizes, CurriculumFetcher(dataset_of, collate))
        self._dataset_of = dataset_of
        self._newest: SampleOrder | None = None

    def fetch_argument(self, step: int, micro_batch: int) -> list[int]:
        """Return the numbers of its samples; as long as the length is the same, they go on as in one data set.

        Raises:
            BadInputError: the step's data set is none that has its samples by number.
        """
        dataset = self._dataset_of(step)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise BadInputError(
                f"the data set of step {step} is a {type(dataset).__name__}: it needs __len__ and __getitem__"
            )
        if self._newest is None or self._newest.length != len(dataset):
            self._newest = self.order.make_order(len(dataset))
        return self._newest.indices(step, micro_batch)
