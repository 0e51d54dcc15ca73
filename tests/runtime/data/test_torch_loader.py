"""A DataLoader passed as data: the parts that are used, the messages, and the refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from holdfast.errors import BadInputError
from holdfast.runtime.data.loading import MicroBatchLoader
from holdfast.runtime.data.torch_loader import DataOptions, unwrap_loader

DATA = TensorDataset(torch.arange(12.0))
CPU = torch.device("cpu")


def collate(samples: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([value for (value,) in samples])


def loaded(data: Any, options: DataOptions | None = None) -> Any:
    return MicroBatchLoader(data, device=CPU, seed=0, global_batch=6, micro_batch=3, options=options).load(1, 1)


def test_a_data_loader_has_the_same_samples_as_its_data_set() -> None:
    bare = loaded(DATA, DataOptions(collate=collate))
    assert torch.equal(loaded(DataLoader(DATA, batch_size=3, collate_fn=collate, shuffle=True)), bare)
    (default,) = loaded(DataLoader(DATA, batch_size=3))
    assert torch.equal(default, bare)
    (unbatched,) = loaded(DataLoader(DATA, batch_size=None))
    assert torch.equal(unbatched, bare)


def test_options_of_a_data_loader_are_used_unless_protect_overrides_them() -> None:
    loader: Any = DataLoader(DATA, batch_size=3, num_workers=1, prefetch_factor=5, collate_fn=collate)
    dataset, options, _ = unwrap_loader(loader, DataOptions(), 3)
    assert dataset is DATA
    assert options == DataOptions(collate=collate, num_workers=1, prefetch_factor=5, pin_memory=False)
    asked = DataOptions(collate=list, num_workers=2, prefetch_factor=4, pin_memory=True)
    assert unwrap_loader(loader, asked, 3)[1] == asked
    assert unwrap_loader(DATA, asked, 3) == (DATA, asked, "")


def test_prefetching_without_loader_workers_is_refused() -> None:
    """torch's DataLoader refuses this as well."""
    with pytest.raises(BadInputError, match=r"prefetch_factor is 4 and num_workers is 0: .* give num_workers above 0"):
        unwrap_loader(DATA, DataOptions(prefetch_factor=4), 3)
    loader: Any = DataLoader(DATA, batch_size=3, num_workers=1)
    assert unwrap_loader(loader, DataOptions(prefetch_factor=4), 3)[1].prefetch_factor == 4


def test_a_loader_with_the_attributes_of_a_data_loader_is_unwrapped() -> None:
    """For example torchdata's StatefulDataLoader, which is not a subclass of torch's and has its own samplers."""
    sampler = SequentialSampler(DATA)
    parts = {"dataset": DATA, "batch_size": 3, "collate_fn": collate, "num_workers": 2, "sampler": sampler}
    foreign = SimpleNamespace(**parts, batch_sampler=BatchSampler(sampler, 3, drop_last=False))
    assert unwrap_loader(foreign, DataOptions(), 3)[:2] == (DATA, DataOptions(collate=collate, num_workers=2))
    whole = {"replacement": False, "num_samples": len(DATA)}
    for theirs, refused in ((whole, False), ({**whole, "num_samples": 3}, True)):
        foreign.sampler = as_torchdata("RandomSampler", **theirs)
        foreign.batch_sampler = as_torchdata("BatchSampler")
        if refused:
            with pytest.raises(BadInputError, match="draws some samples twice, or not all of them"):
                unwrap_loader(foreign, DataOptions(), 3)
        else:
            assert "shuffled in its own order" in unwrap_loader(foreign, DataOptions(), 3)[2]


def as_torchdata(name: str, **attributes: Any) -> Any:
    """Return a sampler of a class that only has the name of torch's class, as in torchdata."""
    return type(name, (), {"__module__": "torchdata.stateful_dataloader.sampler", **attributes})()


def test_the_different_sample_order_of_a_data_loader_is_reported() -> None:
    assert (
        "the loader would give samples in their order"
        in unwrap_loader(DataLoader(DATA, batch_size=3), DataOptions(), 3)[2]
    )
    shuffled: Any = DataLoader(DATA, batch_size=3, shuffle=True, worker_init_fn=print)
    message = unwrap_loader(shuffled, DataOptions(), 3)[2]
    assert "shuffled in its own order" in message
    assert "worker_init_fn is not called" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 4}, "batch_size is 4 and micro_batch is 3"),
        ({}, "batch_size is 1 and micro_batch is 3"),
        ({"batch_size": 3, "sampler": WeightedRandomSampler([1.0] * 12, 12)}, "its own sampler .WeightedRandomSampler"),
        ({"batch_size": 3, "sampler": DistributedSampler(DATA, 2, 0)}, "divides them among workers"),
        ({"batch_size": 3, "sampler": RandomSampler(DATA, replacement=True)}, "twice, or not all"),
        ({"batch_size": 3, "sampler": RandomSampler(DATA, num_samples=5)}, "twice, or not all"),
        ({"batch_sampler": [[0, 1, 2]]}, r"its own batch_sampler .list.*batch\(step, micro_batch\)"),
    ],
)
def test_a_data_loader_with_its_own_choice_of_samples_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        unwrap_loader(DataLoader(DATA, **options), DataOptions(), 3)
