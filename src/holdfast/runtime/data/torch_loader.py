"""torch's DataLoader, taken apart: its data set and how that is read are used, what it says of the order is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from holdfast.errors import BadInputError
from holdfast.runtime.options import check_integers
from holdfast.runtime.tensors import is_unbatched_collate

Collate = Callable[[list[Any]], Any]

#: what loaders of torch's kind have, torchdata's StatefulDataLoader among them
_PARTS = ("dataset", "batch_size", "sampler", "batch_sampler", "collate_fn", "num_workers")
#: processes beside one worker, and micro-batches that each has ahead: more take a machine down, or all of its memory
MAX_LOADER_WORKERS, MAX_PREFETCH = 256, 1024


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How a data set is read.

    collate: makes a micro-batch of a list of samples; torch's default_collate if None. num_workers: loader workers of
    each worker. prefetch_factor: micro-batches that each of them is ahead, 2 if None. pin_memory: batches go to a GPU
    by way of page-locked memory.
    """

    collate: Collate | None = None
    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        """Look at the numbers.

        Raises:
            BadInputError: one makes no sense.
        """
        check_integers(num_workers=self.num_workers)
        if not 0 <= self.num_workers <= MAX_LOADER_WORKERS:
            raise BadInputError(
                f"num_workers is {self.num_workers}: it must be from 0, which is for none, to {MAX_LOADER_WORKERS}"
            )
        if self.prefetch_factor is None:
            return
        check_integers(prefetch_factor=self.prefetch_factor)
        if not 1 <= self.prefetch_factor <= MAX_PREFETCH:
            raise BadInputError(f"prefetch_factor is {self.prefetch_factor}: it must be from 1 to {MAX_PREFETCH}")


def unwrap_loader(data: Any, options: DataOptions, micro_batch: int) -> tuple[Any, DataOptions, str]:
    """Return a DataLoader's data set, how it is read, and what differs from the loader; all else as it is, with "".

    Where `options` says something, that counts; where it does not, what the loader says.

    Raises:
        BadInputError: the loader makes other batches, or says which samples they have; or nobody is there to fetch
            as far ahead as is asked for.
    """
    if not all(hasattr(data, name) for name in _PARTS):
        return data, _check_prefetch(options), ""
    dataset: Any = data.dataset
    streaming = is_stream(dataset)
    if not streaming and (own := _describe_own_order(data)):
        raise BadInputError(
            f"the DataLoader has {own}: holdfast itself says which samples a step has, and shares them out, so that "
            "each counts exactly once whoever computes it; leave that out. For an order of your own, give a data set "
            "that maps indices to the samples you want, or an object with batch(step, micro_batch)"
        )
    if streaming and data.batch_size is None:
        raise BadInputError(
            "the DataLoader's batch_size is None and its data set is gone through: holdfast counts samples, so let the "
            "data set give them one by one, with batch_size=micro_batch; or give an object with open(micro_batch, "
            "micro_batches), which makes micro-batches"
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
    """Return options as they are, once it is known whether there are loader workers.

    Raises:
        BadInputError: they are to fetch ahead, and there are none.
    """
    if options.prefetch_factor is not None and not options.num_workers:
        raise BadInputError(
            f"prefetch_factor is {options.prefetch_factor} and num_workers is 0: nobody is there to fetch ahead; give "
            "num_workers above 0, or leave prefetch_factor out"
        )
    return options


def is_stream(dataset: object) -> bool:
    """Tell whether a data set has no samples by number: it is gone through."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def _describe_own_order(loader: Any) -> str:
    """Say what of a loader decides which samples a batch has, "" where it is nothing but torch's shuffle."""
    sampler, batches = loader.sampler, loader.batch_sampler
    if batches is not None and not _is_torch_sampler(batches, BatchSampler):
        return f"a batch_sampler of its own ({type(batches).__name__})"
    if _is_torch_sampler(sampler, RandomSampler):
        whole = not sampler.replacement and sampler.num_samples == len(loader.dataset)
        return "" if whole else "a sampler that draws some samples twice, or not all of them (RandomSampler)"
    return "" if _is_torch_sampler(sampler, SequentialSampler) else f"a sampler of its own ({type(sampler).__name__})"


def _is_torch_sampler(sampler: object, kind: type) -> bool:
    """Tell whether it is torch's own of this kind, or torchdata's, which says where it stands and draws alike."""
    own = type(sampler)
    return own is kind or (own.__name__ == kind.__name__ and own.__module__.partition(".")[0] == "torchdata")


def _describe_difference(loader: Any) -> str:
    order = "shuffled in an order of its own" if _is_torch_sampler(loader.sampler, RandomSampler) else "as they lie"
    said = (
        f"the DataLoader is taken apart: it would give samples {order}, holdfast shuffles each pass by its seed, so "
        "that a step's samples do not depend on who computes them, and lets passes run into each other, dropping none"
    )
    if getattr(loader, "worker_init_fn", None) is not None:
        said += "; its worker_init_fn is not called: each micro-batch is seeded by itself"
    return said
