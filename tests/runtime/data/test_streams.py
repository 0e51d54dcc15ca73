"""Streams: each micro-batch is the next one of its stream, on any worker and after any earlier work."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from holdfast.errors import BadInputError
from holdfast.runtime.data.loading import MicroBatchLoader, make_job_data
from holdfast.runtime.data.sampling import StepSizes
from holdfast.runtime.data.streams import StreamedData
from holdfast.runtime.data.torch_loader import DataOptions
from holdfast.runtime.state import tree

CPU = torch.device("cpu")
M, SAMPLES = 3, 2
SIZES = StepSizes(seed=5, global_batch=M * SAMPLES, micro_batch=SAMPLES)


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


class Sharded(IterableDataset[int]):
    """Has the interface of an IterableDataset of Hugging Face's `datasets`; `length` samples in six shards."""

    def __init__(self, length: int = 21, shards: tuple[int, ...] = tuple(range(6))) -> None:
        self.length, self.shards = length, shards
        self.epoch = self.given = 0

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.length, self.shards[index::num_shards])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["epoch"] == self.epoch
        self.given = state["given"]

    def __iter__(self) -> Iterator[int]:
        samples = [number for shard in self.shards for number in range(shard, self.length, 6)]
        random.Random(self.epoch).shuffle(samples)
        while self.given < len(samples):
            self.given += 1
            yield samples[self.given - 1]


class Counting:
    """A custom stream: one iterator per micro-batch, with a tuple and a 128-bit number in its state."""

    def __init__(self, wide: int = 1 << 127) -> None:
        self.wide = wide

    def open(self, micro_batch: int, micro_batches: int) -> Any:
        class Pass:
            at = 0

            def __iter__(self) -> Any:
                return self

            def __next__(self) -> tuple[int, int]:
                if self.at == 4:
                    raise StopIteration
                self.at += 1
                return micro_batch, self.at

            def state_dict(inner) -> dict[str, Any]:
                return {"at": (inner.at, None), "wide": self.wide}

            def load_state_dict(inner, state: dict[str, Any]) -> None:
                assert state["wide"] == self.wide
                inner.at, _ = state["at"]

        return Pass()


class Forgetful:
    """Has no state, so it restarts from its beginning."""

    def open(self, micro_batch: int, micro_batches: int) -> Any:
        return iter(range(micro_batch, 50, micro_batches))


class Numbered:
    def batch(self, step: int, micro_batch: int) -> Any:
        return step, micro_batch


def fresh(data: Any) -> StreamedData:
    made = make_job_data(data, list, SIZES)
    assert isinstance(made, StreamedData)
    return made


def fetched(worker: StreamedData, step: int, micro_batch: int) -> Any:
    """Fetch as a loader worker does: both the request and the result are pickled."""
    wanted = pickle.loads(pickle.dumps(worker.fetch_argument(step, micro_batch)))
    return worker.on_fetched(step, micro_batch, worker.fetch(step, micro_batch, wanted))


def calm(data: Any, steps: int) -> list[list[Any]]:
    """Return the micro-batches of these steps as one undisturbed worker goes through them."""
    worker, batches = fresh(data), list[list[Any]]()
    for step in range(1, steps + 1):
        batches.append([])
        notes: list[bytes] = []
        for part in range(M):
            batches[-1].append(fetched(worker, step, part))
            notes.append(worker.make_note())
        worker.merge(notes, [b""])
        worker.apply()
    return batches


def passed_on(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as a joining worker receives it."""
    node = tree.pack(state, lambda tensor: 0, "streams")
    return tree.unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(node), type=tree.Node), [])


@pytest.mark.parametrize("make", [Sharded, Counting, Forgetful])
@settings(max_examples=30, deadline=None)
@given(story=st.randoms(use_true_random=False))
def test_streams_yield_the_same_micro_batches_through_worker_changes(
    make: Callable[[], Any], story: random.Random
) -> None:
    """Workers join, leave, prefetch, repeat steps and restore states; the micro-batches stay the same."""
    expected = calm(make(), 12)
    workers = [fresh(make()) for _ in range(3)]
    saved = (0, passed_on(workers[0].state_dict()))
    step = 1
    for _ in range(25):
        event = story.random()
        if event < 0.15 and len(workers) > 1:
            workers.pop(story.randrange(len(workers)))
        elif event < 0.3:
            joiner = fresh(make())
            joiner.load_state_dict(passed_on(workers[0].state_dict()))
            workers.append(joiner)
        elif event < 0.35:
            step, state = saved[0] + 1, saved[1]
            for worker in workers:
                worker.load_state_dict(copy.deepcopy(state))
        if step > len(expected):
            break
        notes: list[bytes] = []
        for part in range(M):
            worker = story.choice(workers)
            if story.random() < 0.3 and step < len(expected):  # Prefetch, perhaps in vain.
                assert worker.fetch(step + 1, part, worker.fetch_argument(step + 1, part)).batch == expected[step][part]
            for _ in range(story.choice([1, 1, 2])):  # The second time is as after a failure.
                assert fetched(worker, step, part) == expected[step - 1][part]
            notes.append(worker.make_note())
        for worker in workers:
            worker.merge(notes, [b""])
            worker.apply()
        if story.random() < 0.2:
            saved = (step, passed_on(story.choice(workers).state_dict()))
        step += 1


def test_each_pass_through_a_stream_has_each_sample_once() -> None:
    taken = [sample for step in calm(Sharded(), 28) for batch in step for sample in batch]
    assert len(taken) == 28 * M * SAMPLES
    of_streams = [[sample for step in calm(Sharded(), 28) for sample in step[part]] for part in range(M)]
    for part, samples in enumerate(of_streams):
        own = sorted(number for shard in range(part, 6, M) for number in range(shard, 21, 6))
        whole = [samples[start : start + len(own)] for start in range(0, len(samples) - len(own), len(own))]
        assert [sorted(one) for one in whole] == [own] * len(whole)
        assert len({tuple(one) for one in whole}) > 1  # set_epoch() changes the order.


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Counting(wide=0), None),
        (Sharded(shards=(0, 1)), "has 2 shards, but a step has 3 micro-batches"),
        (iter(range(4)), "neither indices nor shards"),
        (3, "the data are a int"),
        ({"train": [1], "test": [2]}, "the data are a dict of 'train', 'test': .* give one of its parts"),
    ],
)
def test_data_that_cannot_be_sharded_are_refused(data: Any, words: str | None) -> None:
    if words is None:
        assert isinstance(make_job_data(data, None, SIZES), StreamedData)
        return
    with pytest.raises(BadInputError, match=words):
        make_job_data(data, None, SIZES)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"buffer": "x" * 5000}, r"has 50\d\d bytes, and at most 4096 are allowed"),
        (
            {"generator": torch.zeros(4)},
            "is a tensor: the state may hold numbers, strings, bytes, lists, tuples, sets and",
        ),
        ({"file": object()}, "is a object: the state may hold numbers"),
        ({"itself": ITSELF}, r"^.{60} \.\.\. .{60} is nested deeper than 32, or holds itself"),
    ],
)
def test_a_stream_state_that_cannot_be_sent_is_refused(state: dict[str, Any], words: str) -> None:
    class Wrong(Sharded):
        def shard(self, num_shards: int, index: int) -> Sharded:
            return Wrong(self.length, self.shards[index::num_shards])

        def state_dict(self) -> dict[str, Any]:
            return state

    with pytest.raises(BadInputError, match=words):
        fetched(fresh(Wrong()), 1, 0)


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"the stream of micro-batch 0 is empty: each needs at least"):
        fetched(fresh(Sharded(length=0)), 1, 0)


def test_a_stream_that_does_not_return_an_iterator_is_refused() -> None:
    class Nothing:
        def open(self, micro_batch: int, micro_batches: int) -> Any:
            return None

    with pytest.raises(
        BadInputError, match=r"of micro-batch 1: open\(\) or shard\(\) returned a NoneType: it must return"
    ):
        fetched(fresh(Nothing()), 1, 1)


def test_a_state_with_another_number_of_streams_is_refused() -> None:
    with pytest.raises(ValueError, match="3 streams of data there, 2 micro-batches here"):
        StreamedData(Counting(), StepSizes(seed=0, global_batch=2, micro_batch=1)).load_state_dict(
            fresh(Counting()).state_dict()
        )


def load(data: Any, step: int, part: int, options: DataOptions | None = None) -> Any:
    loader = MicroBatchLoader(data, device=CPU, seed=0, global_batch=M * SAMPLES, micro_batch=SAMPLES, options=options)
    return loader.load(step, part)


def test_a_numbered_stream_receives_the_step_and_micro_batch_number() -> None:
    assert load(Numbered(), 7, 2) == (7, 2)
    with pytest.raises(ValueError, match="no micro-batch 3 of step 7"):
        load(Numbered(), 7, 3)


def test_a_data_loader_of_an_iterable_data_set_is_unwrapped() -> None:
    loader: Any = DataLoader(Sharded(), batch_size=SAMPLES)
    assert torch.equal(load(loader, 1, 1), torch.tensor(calm(Sharded(), 1)[0][1]))
    with pytest.raises(BadInputError, match="batch_size is None and its data set is iterable"):
        load(DataLoader(Sharded(), batch_size=None), 1, 1)


def test_a_data_set_may_depend_on_the_step() -> None:
    def curriculum(step: int) -> list[int]:
        return list(range(100 * (step // 3), 100 * (step // 3) + 6))

    options = DataOptions(collate=list)
    steps = [[sample for part in range(M) for sample in load(curriculum, step, part, options)] for step in range(1, 6)]
    assert [sorted(step) for step in steps] == [[*range(6)]] * 2 + [[*range(100, 106)]] * 3
    with pytest.raises(BadInputError, match="the data set of step 2 is a NoneType"):
        load(lambda step: None if step == 2 else [1], 2, 0)
    with pytest.raises(BadInputError, match=r"cannot be called with a step's number .* give a function of the step"):
        load(lambda: [1], 1, 0)
