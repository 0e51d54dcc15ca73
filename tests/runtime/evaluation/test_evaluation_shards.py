"""One evaluation: shards that contain each sample once, and means that weigh shards by their samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from holdfast.errors import BadInputError
from holdfast.runtime.checkpoints.best import BestChoice
from holdfast.runtime.evaluation.shards import (
    ModelEvaluation,
    ShardResult,
    find_first_holders,
    intersect_bits,
    pack_shards,
)

X = torch.arange(10.0)
DATA = TensorDataset(X)


def evaluation(data: Any = DATA, **options: Any) -> ModelEvaluation:
    chosen = BestChoice(monitor="loss", mode=options.pop("mode", "min"), keep=options.pop("keep", 0))
    arguments: dict[str, Any] = {"every": 2, "name": "eval", "micro_batch": 4, "choice": chosen, **options}
    measure = arguments.pop("measure", lambda batch: {"loss": batch[0].mean()})
    return ModelEvaluation(measure, data, **arguments)


@pytest.mark.parametrize(
    ("data", "sizes"),
    [(DATA, [4, 4, 2]), (DataLoader(DATA, batch_size=3), [3, 3, 3, 1]), (DataLoader(DATA, batch_size=None), [4, 4, 2])],
)
def test_each_sample_is_in_exactly_one_shard(data: Any, sizes: list[int]) -> None:
    one = evaluation(data)
    batches = [one.fetch(1, shard)[0] for shard in range(one.shards)]
    assert [len(batch) for batch in batches] == sizes
    assert torch.equal(torch.cat(batches), X)
    results = [one.make_result(shard, one.measure(one.fetch(1, shard))) for shard in range(one.shards)]
    assert one.combine(results) == {"loss": pytest.approx(X.mean().item())}


def test_the_collate_function_of_a_loader_is_used() -> None:
    loader = DataLoader(DATA, batch_size=5, collate_fn=lambda samples: len(samples))
    assert [evaluation(loader).fetch(1, shard) for shard in range(2)] == [5, 5]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"every": 0}, "every is 0: it must be a whole number, at least 1"),
        ({"every": 2.0}, "every is 2.0"),
        ({"keep": -1}, "save_top_k is -1"),
        ({"mode": "best"}, "mode is 'best': it must be min or max"),
        ({"name": "a/b"}, "a name has up to 64 letters"),
        ({"name": ""}, "a name has up to 64 letters"),
        ({"name": "x" * 500}, r"^job.evaluate\(name='x{79}\.\.\.\): a name has up to 64 letters"),
        ({"measure": "loss"}, "the function is a str: give a function of a batch"),
        ({"data": TensorDataset(torch.empty(0))}, "the data set is empty"),
        ({"data": Stream()}, "the data set is a Stream: it needs __len__"),
    ],
)
def test_invalid_evaluation_options_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInputError, match=why):
        evaluation(**options)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (1.0, "returned a float: it must return means by name, such as"),
        ({"loss": "low"}, "the value of 'loss' is a str: give a number, or a tensor of one element"),
        ({3: 1.0}, "3 is not a name"),
        ({"a" * 200: 1.0}, "is not a name"),
        ({f"{number:90}": 1.0 for number in range(100)}, "100 values: with their names they may have .* return fewer"),
    ],
)
def test_invalid_results_of_an_evaluation_function_are_refused(found: Any, why: str) -> None:
    with pytest.raises(BadInputError, match=why):
        evaluation().make_result(0, found)


def test_every_shard_must_return_the_same_names_and_the_monitored_one() -> None:
    with pytest.raises(BadInputError, match=r"returned \['a'\] for shard 0 and \['b'\] for shard 1"):
        evaluation().combine([ShardResult(4, {"a": 1.0}), ShardResult(4, {"b": 1.0}), ShardResult(2, {"a": 1.0})])
    with pytest.raises(BadInputError, match=r"monitor='loss'\): its function returns \['a'\]: monitor one"):
        evaluation(keep=1).combine([ShardResult(4, {"a": 1.0})] * 3)


def test_the_first_holder_of_each_shard_is_found() -> None:
    result = ShardResult(1, {})
    bits = [pack_shards(dict.fromkeys(shards, result), 11) for shards in ([0, 10], [3, 0], [])]
    assert find_first_holders(bits, 11) == [0, None, None, 1, *[None] * 6, 0]


def test_a_replica_group_holds_only_shards_that_all_its_ranks_hold() -> None:
    first, second = ({shard: ShardResult(samples=1, means={}) for shard in here} for here in ([0, 3, 9], [3, 9, 10]))
    assert find_first_holders([intersect_bits([pack_shards(first, 11), pack_shards(second, 11)])], 11) == [
        0 if shard in (3, 9) else None for shard in range(11)
    ]
