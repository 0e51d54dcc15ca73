"""Unwraps torch's DataLoader: its data set and how it is read are used, its order is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from holdfast.errors import BadInputError
from holdfast.runtime.options import check_integers
from holdfast.runtime.tensors import is_unbatched_collate

Collate = Callable[[list[Any]], Any]

#: the attributes of a DataLoader, and of torchdata's StatefulDataLoader
_PARTS = ("dataset", "batch_size", "sampler", "batch_sampler", "collate_fn", "num_workers")
#: limits on loader workers per worker and on prefetched micro-batches: more exhaust the machine or its memory
MAX_LOADER_WORKERS, MAX_PREFETCH = 256, 1024


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How a data set is read."""

    #: makes a micro-batch of a list of samples; None: torch's default_collate
    collate: Collate | None = None
    #: loader workers of each worker
    num_workers: int = 0
    #: micro-batches that each loader worker fetches in advance; None: 2
    prefetch_factor: int | None = None
    #: whether batches go to a GPU through page-locked memory
    pin_memory: bool = False

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            BadInputError: one is out of range.
        """
        check_integers(num_workers=self.num_workers)
        if not 0 <= self.num_workers <= MAX_LOADER_WORKERS:
            raise BadInputError(
                f"num_workers is {self.num_workers}: it must be from 0 (no loader workers) to {MAX_LOADER_WORKERS}"
            )
        if self.prefetch_factor is None:
            return
        check_integers(prefetch_factor=self.prefetch_factor)
        if not 1 <= self.prefetch_factor <= MAX_PREFETCH:
            raise BadInputError(f"prefetch_factor is {self.prefetch_factor}: it must be from 1 to {MAX_PREFETCH}")


def unwrap_loader(data: Any, options: DataOptions, micro_batch: int) -> tuple[Any, DataOptions, str]:
    """Return a DataLoader's data set, how to read it, and a warning that its own order is not used.

    Other data are returned as they are, with `options`. The warning is "" for these and for iterable data sets.
    `options` take precedence over the loader's own.

    Args:
        micro_batch: samples of one micro-batch.

    Raises:
        BadInputError: the loader has another batch size, its own order of samples, or an iterable data set without a
            batch size; or it or `options` prefetch without loader workers.
    """
    if not all(hasattr(data, name) for name in _PARTS):
        return data, _check_prefetch(options), ""
    dataset: Any = data.dataset
    streaming = is_stream(dataset)
    if not streaming and (own := _describe_own_order(data)):
        raise BadInputError(
            f"the DataLoader has {own}: holdfast decides which samples a step has and divides them among workers, so "
            "that each counts exactly once; remove it. For your own order, give a data set that maps indices to the "
            "samples you want, or an object with batch(step, micro_batch)"
        )
    if streaming and data.batch_size is None:
        raise BadInputError(
            "the DataLoader's batch_size is None and its data set is iterable: holdfast counts samples, so let the "
            "data set yield single samples, with batch_size=micro_batch; or give an object with open(micro_batch, "
            "micro_batches), which yields micro-batches"
        )
    if data.batch_size not in (None, micro_batch):
        raise BadInputError(
            f"the DataLoader's batch_size is {data.batch_size} and micro_batch is {micro_batch}: both are the samples "
            "of one forward pass; make them the same"
        )
    merged = replace(
        options,
        collate=options.collate or (None if is_unbatched_collate(data.collate_fn) else data.collate_fn),
        num_workers=options.num_workers or data.num_workers,
        prefetch_factor=options.prefetch_factor or getattr(data, "prefetch_factor", None),
        pin_memory=options.pin_memory or bool(getattr(data, "pin_memory", False)),
    )
    return dataset, _check_prefetch(merged), "" if streaming else _describe_difference(data)


def _check_prefetch(options: DataOptions) -> DataOptions:
    """Return the options, if they are consistent.

    Raises:
        BadInputError: they have a prefetch factor, but no loader workers.
    """
    if options.prefetch_factor is not None and not options.num_workers:
        raise BadInputError(
            f"prefetch_factor is {options.prefetch_factor} and num_workers is 0: only loader workers prefetch; give "
            "num_workers above 0, or omit prefetch_factor"
        )
    return options


def is_stream(dataset: object) -> bool:
    """Return whether a data set has no indices and can only be iterated."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def _describe_own_order(loader: Any) -> str:
    """Return how a loader chooses its samples, in words, if a script's own sampler or batch sampler does that, or
    samples are drawn twice or left out; "" for torch's plain shuffle or no shuffle.
    """
    sampler, batches = loader.sampler, loader.batch_sampler
    if batches is not None and not _is_torch_sampler(batches, BatchSampler):
        return f"its own batch_sampler ({type(batches).__name__})"
    if _is_torch_sampler(sampler, RandomSampler):
        whole = not sampler.replacement and sampler.num_samples == len(loader.dataset)
        return "" if whole else "a sampler that draws some samples twice, or not all of them (RandomSampler)"
    return "" if _is_torch_sampler(sampler, SequentialSampler) else f"its own sampler ({type(sampler).__name__})"


def _is_torch_sampler(sampler: object, kind: type) -> bool:
    """Return whether a sampler is torch's of this kind, or torchdata's, which draws the same."""
    own = type(sampler)
    return own is kind or (own.__name__ == kind.__name__ and own.__module__.partition(".")[0] == "torchdata")


def _describe_difference(loader: Any) -> str:
    """Return a warning that the loader's order, shuffled or not, is replaced by holdfast's, and, if it has a
    worker_init_fn, that this is not called.
    """
    order = "shuffled in its own order" if _is_torch_sampler(loader.sampler, RandomSampler) else "in their order"
    text = (
        f"holdfast reads the DataLoader's data set directly: the loader would give samples {order}; holdfast shuffles "
        "each pass by its seed, so that a step's samples do not depend on the worker, and starts the next pass without "
        "dropping samples"
    )
    if getattr(loader, "worker_init_fn", None) is not None:
        text += "; its worker_init_fn is not called: each micro-batch has its own seed"
    return text
