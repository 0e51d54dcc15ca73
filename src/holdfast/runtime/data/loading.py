"""Fetches a worker's micro-batches, ahead of their use where it has loader workers, and brings them to its device."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, cast

import torch

from holdfast.control.link.forking import ProcessSupply
from holdfast.errors import BadInputError
from holdfast.runtime.data.datasets import BatchFetcher, CurriculumData, JobData, MappedData
from holdfast.runtime.data.loader_pool import PREFETCH_FACTOR, PRELOAD_FOR_LOADERS, Key, LoaderPool
from holdfast.runtime.data.randomness import seed_fetch
from holdfast.runtime.data.sampling import StepSizes
from holdfast.runtime.data.streams import Shards, StreamedData
from holdfast.runtime.data.torch_loader import Collate, DataOptions, is_stream, unwrap_loader
from holdfast.runtime.dtensor.place import WHOLE_REPLICA, ReplicaPosition


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
        """Look at the data and fix the order.

        Args:
            zygote: socket of one that loader workers may be forked by; "" where there is none.
            place: which part of each micro-batch's samples is computed here (layouts).

        Raises:
            BadInputError: the data cannot be used as they are, or a number is wrong (`StepSizes`).
        """
        sizes = StepSizes(seed=seed, global_batch=global_batch, micro_batch=micro_batch)
        dataset, self.options, self.difference = unwrap_loader(data, options or DataOptions(), micro_batch)
        self._data = make_job_data(dataset, self.options.collate, sizes)
        self.device = device
        self._part, self._parts = part, parts = place.shard, place.layout.shard
        #: what data sets draw goes with the samples that are fetched: where all are, it is the same in all places
        self._random_part = part if self._data.has_indices else 0
        if micro_batch % parts:
            raise BadInputError(
                f"micro_batch is {micro_batch} and the layout's shard size {parts}: the places of a unit share out a "
                "micro-batch's samples, so it must be a multiple of that"
            )
        #: there are no data beyond this step, or none are needed; None: that is not known
        self.last_step: int | None = None
        self._upcoming: Iterator[Key] = iter(())
        self._ahead: deque[Key] = deque()
        #: what this process fetches itself
        self._own: Key | None = None
        #: the step that was begun last, and the one that is done again (0: none)
        self._last_started = self._repeated = 0
        self._pool = self._make_pool(zygote) if self.options.num_workers else None

    @property
    def streams(self) -> StreamedData | None:
        """Where the data's streams stand, which is part of the training state; None where they have no such thing."""
        return self._data if isinstance(self._data, StreamedData) else None

    @property
    def order(self) -> StepSizes:
        """How many samples a step has; where they have numbers, a `SampleOrder`."""
        return self._data.order

    def start(self) -> None:
        """Start the loader workers, where there are to be any.

        Raises:
            HoldfastError: no process can be started.
        """
        if self._pool is not None:
            self._pool.start()

    def expect(self, coming: Iterator[Key]) -> None:
        """Say which micro-batches will be loaded from now on, as things stand: step and number, in their order."""
        if self._pool is not None:
            self._upcoming, self._ahead = takewhile(self._is_needed, coming), deque()
            self._extend_ahead(self._pool)
            self._start_step(self._pool)
            self._request_ahead(self._pool)

    def load(self, step: int, micro_batch: int) -> Any:
        """Return the collated micro-batch on the device.

        Raises:
            BaseException: whatever data set and collate function raise, also in a loader worker.
            HoldfastError: loader workers die of it.
        """
        self.order.check(step, micro_batch)
        fetched = self._data.on_fetched(step, micro_batch, self._fetch_by_pool(step, micro_batch))
        if self._parts > 1 and not self._data.has_indices:
            fetched = slice_batch(fetched, self._part, self._parts, self.order.micro_batch)
        return move_to_device(fetched, self.device, pin=self._pins)

    def fetch_whole(self, step: int, micro_batch: int) -> Any:
        """Fetch a micro-batch in this process, with the samples of all places of a unit. Not for streams."""
        wanted = self._data.fetch_argument(step, micro_batch)
        seed_fetch(self.order.seed, step, micro_batch, devices=False)
        return self._data.fetch(step, micro_batch, wanted)

    def close(self) -> None:
        """End the loader workers."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _fetch_by_pool(self, step: int, micro_batch: int) -> Any:
        """Return it from a loader worker, where there is one."""
        pool, key = self._pool, (step, micro_batch)
        if pool is None:
            return self._fetch_here(step, micro_batch)
        if key not in self._ahead:
            self._ahead.appendleft(key)
            self._request_ahead(pool)
        # (Where they are only coming up, who waited for them would lose more than time for one micro-batch.)
        here = key == self._own or (step != self._repeated and not pool.will_deliver(key))
        batch = self._fetch_here(step, micro_batch) if here else pool.wait_for(key)
        while self._ahead.popleft() != key:
            pass
        self._extend_ahead(pool)
        self._request_ahead(pool)
        return batch

    def _fetch_here(self, step: int, micro_batch: int) -> Any:
        wanted = self._fetch_argument(step, micro_batch)
        seed_fetch(self.order.seed, step, micro_batch, self._random_part, devices=True)
        return self._data.fetch(step, micro_batch, wanted)

    def _fetch_argument(self, step: int, micro_batch: int) -> Any:
        """Return what is to be fetched here of a micro-batch."""
        wanted = self._data.fetch_argument(step, micro_batch)
        if self._parts == 1 or not self._data.has_indices:
            return wanted
        each = self.order.micro_batch // self._parts
        return wanted[self._part * each : (self._part + 1) * each]

    def _start_step(self, pool: LoaderPool) -> None:
        """A step begins: say whether this process fetches its first micro-batch itself.

        Where nobody was asked for it, it is wanted at once, and loader workers may be in the middle of something else.
        Not where the step is done again: what was another's may be what that one's loader workers have died of.
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
            processes=ProcessSupply(zygote, PRELOAD_FOR_LOADERS),
            keep_apart=self._data.keep_apart,
        )

    @property
    def _pins(self) -> bool:
        return self.options.pin_memory and self.device.type == "cuda"


def make_job_data(data: Any, collate: Collate | None, sizes: StepSizes) -> JobData:
    """Return what a script's data are.

    Raises:
        BadInputError: they cannot be used.
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
    """Tell whether there is a method with these arguments (data sets of others have some of the same name)."""
    found = getattr(data, method, None)
    try:
        return callable(found) and tuple(inspect.signature(found).parameters)[: len(arguments)] == arguments
    except ValueError:  # one that is not written in Python, and does not say
        return False


def _check_numbered(data: object) -> None:
    """Look whether a mapping, where it is one, has its samples by number, and not data sets by name.

    Raises:
        BadInputError: it has not.
    """
    kind = type(data).__name__
    keys = list(cast(Mapping[object, object], data)) if isinstance(data, Mapping) else [0]
    if 0 not in keys:
        names = ", ".join(map(repr, keys[:8]))
        raise BadInputError(
            f"the data are a {kind} of {names}: its samples have no numbers; give one of these parts, "
            "such as data['train']"
        )


def _check_curriculum(data: Callable[..., Any]) -> None:
    """Look whether a function can be given a step.

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
    except ValueError:  # one that is not written in Python, and does not say
        return


def slice_batch(batch: Any, part: int, parts: int, samples: int) -> Any:
    """Return one of equal parts of a micro-batch's samples: of all tensors and lists in it, along their first axis.

    Raises:
        BadInputError: one has another number of samples there.
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
            "they cannot be shared out among the places of a unit; give the data as a data set with __len__ and "
            "__getitem__, or put the samples along the first axis"
        )
    each = samples // parts
    return here[part * each : (part + 1) * each]


def move_to_device(batch: Any, device: torch.device, *, pin: bool = False) -> Any:
    """Move all tensors inside nested lists, tuples and mappings; leave everything else as it is.

    Args:
        pin: by way of page-locked memory, so that nobody waits for the copy but the device.
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
