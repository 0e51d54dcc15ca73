"""Loader workers: real processes, forked by a zygote, that fetch micro-batches ahead of their use."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import BadInputError, HoldfastError
from holdfast.runtime.data.loader_channel import LoaderTracebackError
from holdfast.runtime.data.loading import MicroBatchLoader
from holdfast.runtime.data.sampling import SampleOrder
from holdfast.runtime.data.torch_loader import DataOptions

CPU = torch.device("cpu")
DEADLINE_S = 60.0
STEP = 3  # micro-batches


class Noisy:
    """Draws from all generators, and returns the id of the process that loads it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = torch.rand(3) + random.random() + float(np.random.rand())
        return index + drawn, os.getpid()


class Harmed:
    """Harms the process that fetches sample 5."""

    def __init__(self, harm: Callable[[], object]) -> None:
        self.harm = harm

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 5:
            self.harm()
        return index


class Once:
    """Kills its process the first time."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self) -> None:
        if not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class AwkwardError(Exception):
    """An exception that can be pickled but not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def die() -> None:
    os._exit(7)


def divide() -> None:
    print(1 / 0)


def be_awkward() -> None:
    raise AwkwardError(1, 2)


@pytest.fixture
def make(warm_torch: str) -> Iterator[Callable[..., MicroBatchLoader]]:
    made: list[MicroBatchLoader] = []

    def loader(data: Any, workers: int = 1, up: bool = True, **options: Any) -> MicroBatchLoader:
        one = MicroBatchLoader(
            data,
            device=CPU,
            seed=4,
            global_batch=6,
            micro_batch=2,
            options=DataOptions(num_workers=workers, **options),
            zygote=warm_torch,
        )
        made.append(one)
        one.start()
        if workers and up:
            until(lambda: one._pool is not None and one._pool.workers_up == workers, one)
        return one

    yield loader
    for one in made:
        one.close()


def until(true: Callable[[], bool], loader: MicroBatchLoader | None = None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        if loader is not None:
            assert loader._pool is not None
            loader._pool.will_deliver((1, 0))
        time.sleep(0.005)


def coming(step: int = 1) -> Iterator[tuple[int, int]]:
    return ((number, part) for number in count(step) for part in range(STEP))


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_batches_are_identical_with_and_without_loader_workers(make: Callable[..., MicroBatchLoader]) -> None:
    plain, pooled = make(Noisy(), 0), make(Noisy(), 2)
    pooled.expect(coming())
    assert set(pooled.load(1, 0)[1].tolist()) == {os.getpid()}, (
        "the loader workers have not been asked for the first micro-batch"
    )
    pids: set[int] = set()
    for step in range(1, 9):
        for part in range(STEP):
            (x, _), (y, by) = plain.load(step, part), pooled.load(step, part)
            assert torch.equal(x, y)
            pids |= set(by.tolist())
    assert len(pids - {os.getpid()}) == 2


class Walks:
    """One stream per micro-batch, of batch numbers and the ids of the processes that made them."""

    def open(self, micro_batch: int, micro_batches: int) -> Walk:
        return Walk(micro_batch)


class Walk:
    def __init__(self, micro_batch: int) -> None:
        self.micro_batch, self.at = micro_batch, 0

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> tuple[int, int, int]:
        self.at += 1
        return self.micro_batch, self.at, os.getpid()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_each_stream_is_prefetched_in_one_loader_worker(make: Callable[..., MicroBatchLoader]) -> None:
    loader = make(Walks(), 2, up=False)
    streams = loader.streams
    assert streams is not None
    loader.expect(coming())
    by: set[tuple[int, int]] = set()
    for step in range(1, 9):
        loader.expect(coming(step))
        for _ in range(1 + (step == 4)):  # Step 4 is loaded twice, as after a failure.
            notes: list[bytes] = []
            for part in range(STEP):
                number, at, pid = loader.load(step, part)
                assert (number, at) == (part, step)
                by.add((part, pid))
                notes.append(streams.make_note())
        streams.merge(notes, [b""])
        streams.apply()
    assert len(by) == STEP
    assert os.getpid() not in {pid for _, pid in by}


class Numbers:
    """A stream of numbers."""

    def batch(self, step: int, micro_batch: int) -> tuple[int, int]:
        return step, micro_batch


def test_no_micro_batch_is_fetched_after_the_last_step(make: Callable[..., MicroBatchLoader]) -> None:
    loader = make(Numbers(), 1, prefetch_factor=9)
    pool = loader._pool
    assert pool is not None
    asked: list[tuple[int, int]] = []
    pool._fetch_argument = lambda step, part: asked.append((step, part))
    loader.last_step = 2
    loader.expect(coming())
    assert [loader.load(2, part) for part in range(STEP)] == [(2, part) for part in range(STEP)]
    assert asked == [(step, part) for step in (1, 2) for part in range(STEP)][1:]


def test_the_worker_fetches_data_while_no_loader_worker_is_ready(make: Callable[..., MicroBatchLoader]) -> None:
    loader = make(Noisy(), 1, up=False)
    assert loader._pool is not None
    loader._pool.will_deliver = lambda key: False  # pyright: ignore[reportAttributeAccessIssue]
    loader.expect(coming())
    assert set(loader.load(1, 0)[1].tolist()) == {os.getpid()}


def test_a_changed_plan_is_followed_without_leaking_descriptors(make: Callable[..., MicroBatchLoader]) -> None:
    plain, loader = make(Noisy(), 0), make(Noisy(), 2, prefetch_factor=3)
    before = len(os.listdir("/proc/self/fd"))
    loader.expect(coming())
    wanted = [(2, 1), (2, 0), (7, 2), (7, 1), (2, 0)]  # The last one is repeated, as after a failure.
    for step, part in wanted:
        loader.expect(iter([(1, 0), (step, part)]))
        assert torch.equal(loader.load(step, part)[0], plain.load(step, part)[0])
        assert torch.equal(loader.load(1, 2)[0], plain.load(1, 2)[0])  # This micro-batch was not expected.
    loader.expect(iter(()))
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, loader)


def test_a_loader_worker_inherits_no_descriptors_and_ends_on_close(make: Callable[..., MicroBatchLoader]) -> None:
    loader = make(Noisy(), 1)
    pid = int(loader.load(1, 0)[1][0])
    links = {int(entry.name): os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    beyond = [link for number, link in links.items() if number > 2 and "holdfast-parcel" not in link]
    assert len(beyond) == 1, links
    assert beyond[0].startswith("socket:")
    assert Path(f"/proc/{pid}/comm").read_text() == f"loader-{os.getpid()}\n"
    loader.close()
    until(lambda: not alive(pid))


def test_loader_worker_exceptions_are_raised_with_their_traceback(make: Callable[..., MicroBatchLoader]) -> None:
    loader = make(Harmed(divide))
    causes: list[tuple[int, BaseException | None]] = []
    for part in range(STEP):  # One of the three contains sample 5.
        try:
            loader.load(1, part)
        except ZeroDivisionError as error:
            causes.append((part, error.__cause__))
    ((part, cause),) = causes
    assert isinstance(cause, LoaderTracebackError)
    assert f"loader worker 0, at micro-batch {part} of step 1" in str(cause)
    assert "print(1 / 0)" in str(cause)
    assert [Path(file).name for file, _ in cause.frames][-2:] == [Path(__file__).name] * 2
    with pytest.raises(RuntimeError, match="AwkwardError: 1 and 2"):
        [make(Harmed(be_awkward)).load(1, part) for part in range(STEP)]


def test_a_dead_loader_worker_is_replaced_and_its_micro_batch_retried(
    make: Callable[..., MicroBatchLoader], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make(Harmed(Once(tmp_path / "died")))
    assert sorted(int(one) for part in range(STEP) for one in loader.load(1, part)) == list(range(6))
    (logged,) = [record.getMessage() for record in caplog.records]
    assert "loader worker 0 ended at micro-batch" in logged
    assert "SIGKILL" in logged


def test_a_micro_batch_that_kills_two_loader_workers_raises_an_error(make: Callable[..., MicroBatchLoader]) -> None:
    loader = make(Harmed(die))
    fetched: list[int] = []
    printed: list[str] = []
    for part in range(STEP):
        try:
            fetched += [int(one) for one in loader.load(1, part)]
        except HoldfastError as error:
            printed.append(str(error))
    assert len(fetched) == 4
    assert len(printed) == 1
    assert (
        "of step 1: exit code 7; it was tried twice; with num_workers=0 the script fetches in its own process"
        in printed[0]
    )


def test_loader_workers_fetch_all_micro_batches_of_a_repeated_step(make: Callable[..., MicroBatchLoader]) -> None:
    loader = make(Noisy(), 1, prefetch_factor=1)
    loader.expect(iter([(3, 0)]))
    assert set(loader.load(3, 0)[1].tolist()) == {os.getpid()}
    loader.expect(iter([(3, 2), (3, 1)]))  # These were another worker's micro-batches.
    assert os.getpid() not in {*loader.load(3, 2)[1].tolist(), *loader.load(3, 1)[1].tolist()}
    loader.expect(iter([(4, 1)]))
    assert set(loader.load(4, 1)[1].tolist()) == {os.getpid()}


def test_a_fatal_micro_batch_taken_over_does_not_kill_the_worker(
    make: Callable[..., MicroBatchLoader],
) -> None:
    loader = make(Harmed(die), 1, prefetch_factor=1)
    order = SampleOrder(seed=4, length=6, global_batch=6, micro_batch=2)
    fatal = next(part for part in range(STEP) if 5 in order.indices(1, part))
    loader.expect(iter([(1, part) for part in range(STEP) if part != fatal][:1]))
    loader.expect(iter([(1, fatal)]))
    with pytest.raises(HoldfastError, match=f"at micro-batch {fatal} of step 1: .*it was tried twice"):
        loader.load(1, fatal)


def test_data_that_cannot_be_sent_to_loader_workers_are_refused(make: Callable[..., MicroBatchLoader]) -> None:
    with pytest.raises(BadInputError, match=r"cannot be sent to loader workers: .*lambda.*num_workers=0"):
        make(list(range(6)), collate=lambda samples: samples)
    with pytest.raises(BadInputError, match="open files when samples are"), open(os.devnull) as file:
        make([file])


class Hidden:
    """Can be pickled, but another process cannot import it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _only_here, (os.getpid(),)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


def _only_here(pid: int) -> Hidden:
    if pid != os.getpid():
        raise FileNotFoundError("the index of the data set")
    return Hidden()


def test_errors_in_receiving_the_data_set_are_raised_with_a_traceback(
    make: Callable[..., MicroBatchLoader],
) -> None:
    loader = make(Hidden(), up=False)
    until(lambda: loader._pool is not None and loader._pool.will_deliver((1, 0)))
    with pytest.raises(FileNotFoundError, match="the index of the data set") as error:
        loader.load(1, 0)
    assert "while it received the data set" in str(error.value.__cause__)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": -1}, "num_workers is -1"),
        ({"num_workers": 100_000}, "num_workers is 100000: it must be from 0 .no loader workers. to 256"),
        ({"num_workers": 1.5}, "num_workers is 1.5"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor is 0"),
    ],
)
def test_invalid_loader_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        DataOptions(**options)
