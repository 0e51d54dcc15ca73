"""Fetches a worker's micro-batches and moves them to its device. Loader workers fetch in advance."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, cast

import torch

from holdfast.control.link.forking import ProcessForker
from holdfast.errors import BadInputError
from holdfast.runtime.data.datasets import BatchFetcher, CurriculumData, JobData, MappedData
from holdfast.runtime.data.loader_pool import PREFETCH_FACTOR, PRELOAD_FOR_LOADERS, Key, LoaderPool
from holdfast.runtime.data.randomness import seed_fetch
from holdfast.runtime.data.sampling import StepSizes
from holdfast.runtime.data.streams import Shards, StreamedData
from holdfast.runtime.data.torch_loader import Collate, DataOptions, is_stream, unwrap_loader
from holdfast.runtime.dtensor.replica_position import WHOLE_REPLICA, ReplicaPosition


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
        zygote: str = "",
        place: ReplicaPosition = WHOLE_REPLICA,
    ) -> None:
        """Check the data, and set the order of samples.

        Args:
            zygote: the socket of a zygote that can fork loader workers, or "".
            place: which part of each micro-batch's samples this rank computes (layouts).

        Raises:
            BadInputError: the data cannot be used, or a number is wrong (`StepSizes`).
        """
        sizes = StepSizes(seed=seed, global_batch=global_batch, micro_batch=micro_batch)
        dataset, self.options, self.difference = unwrap_loader(data, options or DataOptions(), micro_batch)
        self._data = make_job_data(dataset, self.options.collate, sizes)
        self.device = device
        self._part, self._parts = part, parts = place.shard, place.layout.shard
        #: the part that seeds fetches: data that are fetched whole have the same randomness on all ranks of a replica
        #: group
        self._random_part = part if self._data.has_indices else 0
        if micro_batch % parts:
            raise BadInputError(
                f"micro_batch is {micro_batch} and the layout's shard size {parts}: ranks of a replica group split the "
                "samples of a micro-batch, so micro_batch must be a multiple of the shard size"
            )
        #: no data are needed after this step; None: not known
        self.last_step: int | None = None
        self._upcoming: Iterator[Key] = iter(())
        self._ahead: deque[Key] = deque()
        #: the micro-batch that this process fetches itself
        self._own: Key | None = None
        #: the step that was started last, and the step that is repeated (0: none)
        self._last_started = self._repeated = 0
        self._pool = self._make_pool(zygote) if self.options.num_workers else None

    @property
    def streams(self) -> StreamedData | None:
        """The data's streams, with positions that are part of the training state; None for other data."""
        return self._data if isinstance(self._data, StreamedData) else None

    @property
    def order(self) -> StepSizes:
        """How many samples a step has; a `SampleOrder` if they have indices."""
        return self._data.order

    def start(self) -> None:
        """Start the loader workers, if the script wants them.

        Raises:
            HoldfastError: no process can be started.
        """
        if self._pool is not None:
            self._pool.start()

    def expect(self, coming: Iterator[Key]) -> None:
        """Announce the micro-batches to load from now on (step and number, in order), so that loader workers fetch the
        first ones; earlier announcements are void. They end before the first step after `last_step`.

        If the first one was not requested before, this process may fetch it itself in `load` (`_choose_own_fetch`).
        Does nothing without loader workers.
        """
        if self._pool is not None:
            self._upcoming, self._ahead = takewhile(self._is_needed, coming), deque()
            self._extend_ahead(self._pool)
            self._choose_own_fetch(self._pool)
            self._request_ahead(self._pool)

    def load(self, step: int, micro_batch: int) -> Any:
        """Return the collated micro-batch, or this rank's part of its samples if the layout splits them, on the device.
        It comes from a loader worker, or is fetched here.

        Raises:
            ValueError: the micro-batch does not exist.
            BadInputError: its samples cannot be split.
            BaseException: an exception of the data set or collate function, also in a loader worker.
            HoldfastError: loader workers die of it, or fail to start.
        """
        self.order.check_micro_batch(step, micro_batch)
        fetched = self._data.on_fetched(step, micro_batch, self._fetch_part(step, micro_batch))
        if self._parts > 1 and not self._data.has_indices:
            fetched = slice_batch(fetched, self._part, self._parts, self.order.micro_batch)
        return move_to_device(fetched, self.device, pin=self._pins)

    def fetch_whole(self, step: int, micro_batch: int) -> Any:
        """Fetch a micro-batch in this process, and return it on the host, with the samples of all ranks of a replica
        group. Seeds the global random generators. Not for streams.
        """
        argument = self._data.fetch_argument(step, micro_batch)
        seed_fetch(self.order.seed, step, micro_batch, devices=False)
        return self._data.fetch(step, micro_batch, argument)

    def close(self) -> None:
        """End the loader workers. Later micro-batches are fetched in this process."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _fetch_part(self, step: int, micro_batch: int) -> Any:
        """Return what `fetch` returns for a micro-batch, from a loader worker, and request the next ones. It is fetched
        here if there are no loader workers, while none is ready, and if it is the first one of a step and was not
        requested in time.

        But a loader worker must fetch it if one has died of it, in a repeated step, and for streams. Raises the errors
        of `LoaderPool.wait_for`, and those of fetching here.
        """
        pool, key = self._pool, (step, micro_batch)
        if pool is None:
            return self._fetch_here(step, micro_batch)
        if key not in self._ahead:
            self._ahead.appendleft(key)
            self._request_ahead(pool)
        # While loader workers start, waiting for them would take longer than fetching here.
        here = key == self._own or (step != self._repeated and not pool.will_deliver(key))
        batch = self._fetch_here(step, micro_batch) if here else pool.wait_for(key)
        while self._ahead.popleft() != key:
            pass
        self._extend_ahead(pool)
        self._request_ahead(pool)
        return batch

    def _fetch_here(self, step: int, micro_batch: int) -> Any:
        """Seed the random generators, and fetch this rank's part of a micro-batch in this process."""
        argument = self._fetch_argument(step, micro_batch)
        seed_fetch(self.order.seed, step, micro_batch, self._random_part, devices=True)
        return self._data.fetch(step, micro_batch, argument)

    def _fetch_argument(self, step: int, micro_batch: int) -> Any:
        """Return the third argument of `fetch`: this rank's part of the sample indices, if the data have indices and
        ranks of a replica group split a micro-batch; otherwise the data's argument as it is.
        """
        argument = self._data.fetch_argument(step, micro_batch)
        if self._parts == 1 or not self._data.has_indices:
            return argument
        each = self.order.micro_batch // self._parts
        return argument[self._part * each : (self._part + 1) * each]

    def _choose_own_fetch(self, pool: LoaderPool) -> None:
        """Decide whether this process fetches the first announced micro-batch itself, and store it as `_own`, else
        None.

        It does if that was not requested: it is needed at once, and loader workers may be busy. But in a repeated step
        they fetch it: another worker's micro-batch may be the one that its loader workers died of. They also do for
        streams, and if one has died of it.
        """
        self._own = None
        if not self._ahead:
            return
        step = self._ahead[0][0]
        self._repeated, self._last_started = step if step <= self._last_started else 0, step
        if not self._repeated and not pool.is_reserved(self._ahead[0]):
            self._own = self._ahead[0]

    def _extend_ahead(self, pool: LoaderPool) -> None:
        self._ahead.extend(islice(self._upcoming, max(0, pool.capacity - len(self._ahead))))

    def _request_ahead(self, pool: LoaderPool) -> None:
        pool.request(key for key in self._ahead if key != self._own)

    def _is_needed(self, key: Key) -> bool:
        return self.last_step is None or key[0] <= self.last_step

    def _make_pool(self, zygote: str) -> LoaderPool:
        return LoaderPool(
            self._data.fetch,
            self._fetch_argument,
            seed=self.order.seed,
            part=self._random_part,
            workers=self.options.num_workers,
            ahead=self.options.prefetch_factor or PREFETCH_FACTOR,
            processes=ProcessForker(zygote, PRELOAD_FOR_LOADERS),
            keep_apart=self._data.keep_apart,
        )

    @property
    def _pins(self) -> bool:
        return self.options.pin_memory and self.device.type == "cuda"


def make_job_data(data: Any, collate: Collate | None, sizes: StepSizes) -> JobData:
    """Return the data of a script, by the first kind that fits: an object with batch(step, micro_batch), one with
    open(micro_batch, micro_batches), a data set with indices, an iterable data set with shards, or a function that
    returns the data set of a step.

    Args:
        collate: makes a micro-batch of samples; None: torch's default.

    Raises:
        BadInputError: no kind fits, or the data set is empty or cannot be divided.
    """
    if _has_method(data, "batch", "step", "micro_batch"):
        return JobData(sizes, BatchFetcher(data))
    if _has_method(data, "open", "micro_batch", "micro_batches"):
        return StreamedData(data, sizes)
    _check_numbered(data)
    if not is_stream(data) and hasattr(data, "__len__"):
        return MappedData(data, collate, sizes)
    if hasattr(data, "__iter__"):
        return StreamedData(Shards(data, collate, sizes.micro_batch), sizes)
    if callable(data):
        _check_curriculum(data)
        return CurriculumData(data, collate, sizes)
    raise BadInputError(
        f"the data are a {type(data).__name__}: they must be a data set with __len__ and __getitem__, a DataLoader, an "
        "object with batch(step, micro_batch) or open(micro_batch, micro_batches), or a function of the step that "
        "returns a data set"
    )


def _has_method(data: Any, method: str, *arguments: str) -> bool:
    """Return whether there is a method whose first arguments have these names; other data sets may have methods of the
    same name. False if its signature is unknown.
    """
    found = getattr(data, method, None)
    try:
        return callable(found) and tuple(inspect.signature(found).parameters)[: len(arguments)] == arguments
    except ValueError:  # not written in Python, so its signature is unknown
        return False


def _check_numbered(data: object) -> None:
    """Check that a mapping has samples by index, with the key 0, not data sets by name. Other objects are accepted.

    Raises:
        BadInputError: it has data sets by name.
    """
    kind = type(data).__name__
    keys = list(cast(Mapping[object, object], data)) if isinstance(data, Mapping) else [0]
    if 0 not in keys:
        names = ", ".join(map(repr, keys[:8]))
        raise BadInputError(
            f"the data are a {kind} of {names}: its samples have no indices; give one of its parts, "
            "such as data['train']"
        )


def _check_curriculum(data: Callable[..., Any]) -> None:
    """Check that a function can be called with one argument, the step. One with an unknown signature is accepted.

    Raises:
        BadInputError: it cannot.
    """
    try:
        inspect.signature(data).bind(1)
    except TypeError as error:
        raise BadInputError(
            f"the data are a function that cannot be called with a step's number ({error}): give a function of the "
            "step, such as `lambda step: easy if step < 1000 else hard`, or the data set itself"
        ) from None
    except ValueError:  # not written in Python, so its signature is unknown
        return


def slice_batch(batch: Any, part: int, parts: int, samples: int) -> Any:
    """Return part `part` of `parts` equal parts of a micro-batch: a slice of each tensor and list in it, along the
    first axis. Dicts, tuples, and lists of tensors or lists are not cut, but their items are. Scalars and other values
    are returned unchanged.

    Args:
        samples: number of samples in the micro-batch.

    Raises:
        BadInputError: a tensor or list has another length along the first axis.
    """
    if isinstance(batch, dict):
        return {key: slice_batch(value, part, parts, samples) for key, value in cast(dict[Any, Any], batch).items()}
    if isinstance(batch, tuple) or (isinstance(batch, list) and batch and isinstance(batch[0], torch.Tensor | list)):
        values = cast(Sequence[Any], batch)
        made = [slice_batch(value, part, parts, samples) for value in values]
        make = cast(Callable[..., Any], type(values))
        return make(*made) if hasattr(values, "_fields") else make(made)
    if not isinstance(batch, torch.Tensor | list):
        return batch
    here = cast(torch.Tensor | list[Any], batch)
    if isinstance(here, torch.Tensor) and here.ndim == 0:
        return here
    if len(here) != samples:
        raise BadInputError(
            f"a micro-batch has {len(here)} entries along the first axis of one of its parts, and {samples} samples: "
            "they cannot be split between the ranks of a replica group; give the data as a data set with __len__ and "
            "__getitem__, or put the samples along the first axis"
        )
    each = samples // parts
    return here[part * each : (part + 1) * each]


def move_to_device(batch: Any, device: torch.device, *, pin: bool = False) -> Any:
    """Return a batch with all tensors inside nested lists, tuples and dicts on the device; other values are
    unchanged.

    Args:
        pin: copy through page-locked memory, so that only the device waits for the copy.
    """
    if isinstance(batch, torch.Tensor):
        return (batch.pin_memory() if pin and batch.device.type == "cpu" else batch).to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: move_to_device(value, device, pin=pin) for key, value in cast(dict[Any, Any], batch).items()}
    if isinstance(batch, list | tuple):
        values = cast(Sequence[Any], batch)
        moved = [move_to_device(value, device, pin=pin) for value in values]
        make = cast(Callable[..., Any], type(values))
        return make(*moved) if hasattr(values, "_fields") else make(moved)
    return batch
