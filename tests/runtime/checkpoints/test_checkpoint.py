from __future__ import annotations

import errno
import io
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest
import torch

from holdfast.control.link.checkpoints.store import CheckpointStore, PartToWrite
from holdfast.errors import BadInputError
from holdfast.protocol.checkpoints import directory as checkpoint_dir
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError
from holdfast.protocol.checkpoints.names import StoredFile
from holdfast.protocol.commit import Wish
from holdfast.protocol.messages.orders import AcceptCheckpoint, Inject, PruneCheckpoints
from holdfast.protocol.messages.worker import CheckpointKept, CheckpointUnwritten, CheckpointWritten
from holdfast.runtime.checkpoints.best import BestStates
from holdfast.runtime.checkpoints.saver import CheckpointSaver, PartShare, load_checkpoint
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.state.state import TrainingState, state_hash
from holdfast.storage import Chunk, LocalStorage

DEADLINE_S = 60.0


def make(steps: int, width: int = 8) -> TrainingState:
    torch.manual_seed(steps)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    for _ in range(steps):
        train(model, optimizer)
        schedule.step()
    return TrainingState(model, optimizer, {"schedule": schedule})


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


class RecordingCoordinator:
    """A passive coordinator that only records messages."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Any] = queue.Queue()

    def next(self, kind: type[Any]) -> Any:
        message = self.messages.get(timeout=DEADLINE_S)
        assert isinstance(message, kind)
        return message


ORIGIN = PartShare(term=2, generation=1, seal="ab")


def saver_of(
    storage: LocalStorage, coordinator: RecordingCoordinator, every: int = 1, at_disk: Callable[[], None] = lambda: None
) -> CheckpointSaver:
    tell = coordinator.messages.put
    store = CheckpointStore(storage, tell, worker="n/0/a", at_disk=at_disk)
    return CheckpointSaver(
        storage=storage, worker="n/0/a", every=every, sink=store, send=tell, forward_order=store.execute
    )


def save(directory: Path, state: TrainingState, step: int, share: PartShare = ORIGIN) -> str:
    coordinator = RecordingCoordinator()
    saver = saver_of(LocalStorage(directory), coordinator)
    assert saver.save_if_due(state, step, share)
    written = coordinator.next(CheckpointWritten)
    assert (written.step, written.term, written.generation) == (step, share.term, share.generation)
    saver.on_order(accepted(written))
    kept = coordinator.next(CheckpointKept)
    assert not saver.is_idle
    saver.on_order(settled(written))
    saver.close()
    assert saver.is_idle
    assert saver.saved_step == step
    assert kept.bytes == sum(file.bytes for file in written.files) > 0
    return kept.name


def settled(written: CheckpointWritten) -> AcceptCheckpoint:
    """Return the order that accepts a written checkpoint."""
    return AcceptCheckpoint(term=written.term, generation=written.generation, step=written.step, name=written.name)


def accepted(written: CheckpointWritten) -> AcceptCheckpoint:
    return AcceptCheckpoint(
        term=written.term,
        generation=written.generation,
        step=written.step,
        name=written.name,
        files=written.files,
    )


def test_a_loaded_checkpoint_restores_the_state_exactly(tmp_path: Path) -> None:
    source, target = make(3), make(0)
    name = save(tmp_path, source, 3)
    assert load_checkpoint(LocalStorage(tmp_path), name, target) == 3
    assert state_hash(target.capture()) == state_hash(source.capture())


def test_a_checkpoint_is_completed_although_keeping_best_states_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the training thread, which waits for the checkpoint at the end, would wait forever."""

    def fail(_best: BestStates, _step: int) -> None:
        raise RuntimeError

    monkeypatch.setattr(BestStates, "on_complete", fail)
    save(tmp_path, make(3), 3)


class HeldStorage(LocalStorage):
    """A storage that writes nothing before it is released."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.release = threading.Event()

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        assert self.release.wait(DEADLINE_S)
        super().write(path, chunks)


def test_a_save_contains_the_state_at_the_time_of_the_call(tmp_path: Path) -> None:
    """The files are written later, while training changes the tensors in place; no such change may be saved."""
    source, target, coordinator = make(3), make(0), RecordingCoordinator()
    before, storage = state_hash(source.capture()), HeldStorage(tmp_path)
    saver = saver_of(storage, coordinator)
    assert saver.save_if_due(source, 3, ORIGIN)
    train(source.model, source.optimizers.by_name[""])
    assert state_hash(source.capture()) != before
    storage.release.set()
    saver.on_order(accepted(coordinator.next(CheckpointWritten)))
    name = coordinator.next(CheckpointKept).name
    saver.close()
    load_checkpoint(LocalStorage(tmp_path), name, target)
    assert state_hash(target.capture()) == before


def test_a_checkpoint_named_by_an_earlier_version_is_loaded(tmp_path: Path) -> None:
    source, target = make(3), make(0)
    (tmp_path / save(tmp_path, source, 3)).rename(tmp_path / "step-00000003")
    assert load_checkpoint(LocalStorage(tmp_path), "step-00000003", target) == 3
    assert state_hash(target.capture()) == state_hash(source.capture())


@pytest.mark.parametrize("wakes_first", [True, False])
def test_an_expelled_writer_does_not_affect_the_current_checkpoint(tmp_path: Path, *, wakes_first: bool) -> None:
    """The order to accept a checkpoint of the abandoned lineage was already in its socket."""
    coordinator, decided, target = RecordingCoordinator(), make(3), make(0)
    old = saver_of(LocalStorage(tmp_path), coordinator)
    assert old.save_if_due(make(1), 3, PartShare(term=1, generation=1, seal="cd"))
    order = accepted(coordinator.next(CheckpointWritten))
    if wakes_first:
        old.on_order(order)
        coordinator.next(CheckpointKept)
    name = save(tmp_path, decided, 3)
    if not wakes_first:
        old.on_order(order)
    old.close()
    load_checkpoint(LocalStorage(tmp_path), name, target)
    assert state_hash(target.capture()) == state_hash(decided.capture())
    assert checkpoint_dir.find_checkpoints(LocalStorage(tmp_path))[-1].folder == name


def test_a_checkpoint_written_by_four_workers_is_loaded_by_one(tmp_path: Path) -> None:
    state, target, coordinator = make(3), make(0), RecordingCoordinator()
    savers = [saver_of(LocalStorage(tmp_path), coordinator) for _ in range(4)]
    for rank, saver in enumerate(savers):
        assert saver.save_if_due(state, 3, PartShare(term=1, generation=1, rank=rank, world=4, seal="ab"))
    written = [coordinator.next(CheckpointWritten) for _ in savers]
    assert sorted(part.part for part in written) == [0, 1, 2, 3]
    files = tuple(file for part in written for file in part.files)
    assert checkpoint_dir.find_checkpoints(LocalStorage(tmp_path)) == []
    savers[2].on_order(msgspec.structs.replace(accepted(written[0]), files=files))
    name = coordinator.next(CheckpointKept).name
    for saver in savers:
        saver.on_order(settled(written[0]))
        saver.close()
        assert saver.is_idle
    assert load_checkpoint(LocalStorage(tmp_path), name, target) == 3
    assert state_hash(target.capture()) == state_hash(state.capture())


def test_only_checkpoints_named_by_the_coordinator_are_removed(tmp_path: Path) -> None:
    names = [save(tmp_path, make(step), step) for step in (1, 2, 3)]
    saver = saver_of(LocalStorage(tmp_path), RecordingCoordinator())
    saver.on_order(PruneCheckpoints(term=1, names=(names[0],), remove=False))
    saver.on_order(PruneCheckpoints(term=1, names=(names[1],)))
    saver.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [names[0], names[2]]


def test_a_checkpoint_accepted_twice_is_reported_twice(tmp_path: Path) -> None:
    """A new coordinator does not know which messages its predecessor received."""
    coordinator = RecordingCoordinator()
    saver = saver_of(LocalStorage(tmp_path), coordinator)
    assert saver.save_if_due(make(1), 1, ORIGIN)
    order = accepted(coordinator.next(CheckpointWritten))
    saver.on_order(order)
    saver.on_order(order)
    assert coordinator.next(CheckpointKept) == coordinator.next(CheckpointKept)
    saver.close()


def test_a_checkpoint_written_before_a_rollback_is_no_longer_awaited(tmp_path: Path) -> None:
    coordinator = RecordingCoordinator()
    saver = saver_of(LocalStorage(tmp_path), coordinator)
    assert saver.save_if_due(make(1), 1, ORIGIN)
    coordinator.next(CheckpointWritten)
    assert not saver.is_idle
    saver.on_loaded("")
    assert saver.is_idle
    assert not saver.has_saved(1, ORIGIN)
    saver.close()


def test_a_pruned_checkpoint_is_no_longer_awaited(tmp_path: Path) -> None:
    coordinator = RecordingCoordinator()
    saver = saver_of(LocalStorage(tmp_path), coordinator)
    assert saver.save_if_due(make(1), 1, ORIGIN)
    written = coordinator.next(CheckpointWritten)
    assert saver.has_saved(1, ORIGIN)
    saver.on_order(PruneCheckpoints(term=1, names=(written.name,)))
    assert saver.is_idle
    assert not saver.has_saved(1, ORIGIN)
    saver.close()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_found_damaged_by_others_is_written_again(tmp_path: Path) -> None:
    """This worker loaded it without errors and the others got its step from here, so no other copy exists."""
    name = save(tmp_path, make(1), 1)
    saver = saver_of(LocalStorage(tmp_path), RecordingCoordinator())
    saver.on_loaded(name)
    again = PartShare(term=2, generation=2, seal="cd")
    saver.on_order(PruneCheckpoints(term=2, names=(ORIGIN.checkpoint_name(9).folder,), remove=False))
    assert saver.has_saved(1, again)
    saver.on_order(PruneCheckpoints(term=2, names=(name,), remove=False))
    assert not saver.has_saved(1, again)
    assert saver.saved_step == 0
    saver.close()
    assert (tmp_path / name).is_dir(), "the damaged checkpoint must stay for a person to inspect"


def test_a_hanging_store_is_reported_and_does_not_block_training(tmp_path: Path) -> None:
    coordinator, storage = RecordingCoordinator(), HeldStorage(tmp_path)
    store = CheckpointStore(storage, coordinator.messages.put, worker="n/0/a", stalled_s=0.05)
    saver = CheckpointSaver(storage=storage, worker="n/0/a", every=1, sink=store, send=coordinator.messages.put)
    assert saver.save_if_due(make(1), 1, ORIGIN)
    unwritten = coordinator.next(CheckpointUnwritten)
    assert "has not answered for 0.05 s" in unwritten.why
    assert saver.is_still_saving(2)
    assert not saver.save_if_due(make(1), 2, ORIGIN, (Wish.STILL_SAVING,)), "the save must be left out, not queued"
    saver.close()
    storage.release.set()


def test_a_save_queued_behind_a_hanging_one_is_also_reported(tmp_path: Path) -> None:
    coordinator, storage = RecordingCoordinator(), HeldStorage(tmp_path)
    store = CheckpointStore(storage, coordinator.messages.put, worker="n/0/a", stalled_s=0.05)
    saver = CheckpointSaver(storage=storage, worker="n/0/a", every=1, sink=store, send=coordinator.messages.put)
    assert saver.save(make(1), 1, ORIGIN)
    assert coordinator.next(CheckpointUnwritten).step == 1
    assert saver.save(make(1), 2, ORIGIN), "the last save of a job, which all workers wait for, must be queued"
    assert coordinator.next(CheckpointUnwritten).step == 2
    through = threading.Event()
    store.run_later(through.set)
    storage.release.set()
    assert through.wait(DEADLINE_S)
    saver.close()
    assert coordinator.messages.empty()
    assert [name.partition("-t")[0] for name in storage.entries()] == ["step-00000001"], (
        "the second checkpoint is not needed and must not be kept"
    )


def test_a_hanging_removal_is_logged_once(tmp_path: Path) -> None:
    coordinator, removes, go, lines = (
        RecordingCoordinator(),
        threading.Event(),
        threading.Event(),
        queue.SimpleQueue[str](),
    )

    class Held(LocalStorage):
        def remove(self, path: str) -> None:
            removes.set()
            assert go.wait(DEADLINE_S)

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.put(record.getMessage())

    log, handler = logging.getLogger("holdfast.control.link.checkpoints.store"), Lines()
    log.addHandler(handler)
    try:
        store = CheckpointStore(Held(tmp_path), coordinator.messages.put, worker="n/0/a", stalled_s=0.05)
        store.execute(PruneCheckpoints(term=1, names=(ORIGIN.checkpoint_name(1).folder,)))
        assert removes.wait(DEADLINE_S)
        assert lines.get(timeout=DEADLINE_S).startswith(
            f"{tmp_path} has not answered for 0.05 s to a request to list or remove"
        )
        store.write(PartToWrite(name=ORIGIN.checkpoint_name(2), worker="n/0/a", files={"a": lambda: [b"x"]}))
        assert coordinator.next(CheckpointUnwritten).step == 2
        go.set()
        store.close()
    finally:
        log.removeHandler(handler)
    assert [lines.get_nowait() for _ in range(lines.qsize())] == [
        f"the checkpoint of step 2: {tmp_path} has not answered for 0.05 s"
    ]


class SlowStorage(LocalStorage):
    """A disk that is slow to read, chunk by chunk."""

    pause_s = 0.0

    def open(self, path: str) -> BinaryIO:
        pause_s, file = self.pause_s, super().open(path)
        if not path.endswith("/a"):
            return file

        class Slow(io.BytesIO):
            def read(self, size: int | None = -1, /) -> bytes:
                time.sleep(pause_s)
                return super().read(1)

        with file:
            return Slow(file.read())


def test_a_checkpoint_that_is_slow_to_verify_is_kept(tmp_path: Path) -> None:
    coordinator, storage = RecordingCoordinator(), SlowStorage(tmp_path)
    store = CheckpointStore(storage, coordinator.messages.put, worker="n/0/a", stalled_s=1.0)
    name = ORIGIN.checkpoint_name(1)
    store.write(PartToWrite(name=name, worker="n/0/a", files={"a": lambda: [b"x" * 30]}))
    written = coordinator.next(CheckpointWritten)
    storage.pause_s = 0.05
    store.execute(accepted(written))
    coordinator.next(CheckpointKept)
    store.close()


@pytest.mark.parametrize("overtaken", [True, False])
def test_no_error_is_logged_if_an_overtaken_checkpoint_cannot_be_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, overtaken: bool
) -> None:
    coordinator, storage = RecordingCoordinator(), LocalStorage(tmp_path)
    store = CheckpointStore(storage, coordinator.messages.put, worker="n/0/a")
    store.write(PartToWrite(name=ORIGIN.checkpoint_name(1), worker="n/0/a", files={"a": lambda: [b"x"]}))
    written = coordinator.next(CheckpointWritten)
    if overtaken:
        store.give_up_before(ORIGIN.checkpoint_name(2))
    storage.remove(written.name)
    store.execute(accepted(written))
    assert coordinator.next(CheckpointUnwritten).step == 1
    store.close()
    assert bool(caplog.messages) is not overtaken


def test_a_save_without_memory_for_its_copy_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = RecordingCoordinator()
    saver = saver_of(LocalStorage(tmp_path), coordinator)

    def no_room(*_: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("holdfast.runtime.checkpoints.saver.copy_part", no_room)
    assert not saver.save(make(1), 1, ORIGIN)
    unwritten = coordinator.next(CheckpointUnwritten)
    assert (unwritten.step, unwritten.name) == (1, ORIGIN.checkpoint_name(1).folder)
    assert "does not fit into memory" in unwritten.why
    saver.close()


def test_a_truncated_checkpoint_does_not_change_the_state(tmp_path: Path) -> None:
    name = save(tmp_path, make(3), 3)
    largest = max((tmp_path / name).iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    target = make(0)
    before = state_hash(target.capture())
    with pytest.raises(DamagedCheckpointError, match="cut short"):
        load_checkpoint(LocalStorage(tmp_path), name, target)
    assert state_hash(target.capture()) == before


def test_a_checkpoint_with_nan_values_is_reported_as_damaged(tmp_path: Path) -> None:
    """A snapshot with such values is rejected in the same way; the job returns to an older one."""
    state = make(3)
    with torch.no_grad():
        state.model.get_parameter("weight")[3, 3] = float("nan")
    name = save(tmp_path, state, 3)
    saver = saver_of(LocalStorage(tmp_path), RecordingCoordinator())
    with pytest.raises(DamagedCheckpointError, match="weight contains a NaN"):
        saver.load(name, make(0), first=True)
    saver.close()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    name = save(tmp_path, make(3), 3)
    with pytest.raises(BadInputError, match="not of this model"):
        load_checkpoint(LocalStorage(tmp_path), name, make(0, width=9))


def test_one_checkpoint_is_saved_at_a_time_and_only_if_due(tmp_path: Path) -> None:
    coordinator, storage = RecordingCoordinator(), HeldStorage(tmp_path)
    saver = saver_of(storage, coordinator, every=2)
    state = make(1)
    assert saver.is_idle
    assert not saver.save_if_due(state, 1, ORIGIN)
    assert not saver.is_still_saving(2)
    assert saver.save_if_due(state, 2, ORIGIN)
    assert [saver.is_still_saving(step) for step in (3, 4)] == [False, True], "nothing is due after step 3"
    assert not saver.save_if_due(state, 4, ORIGIN, (Wish.STILL_SAVING,))
    assert not saver.save_if_due(state, 5, ORIGIN, (Wish.SAVE_IF_FREE, Wish.STILL_SAVING))
    assert not saver.is_idle
    assert saver.save_if_due(state, 5, ORIGIN, (Wish.SAVE, Wish.STILL_SAVING)), "a requested save must not be left out"
    storage.release.set()
    assert [coordinator.next(CheckpointWritten).step for _ in range(2)] == [2, 5]
    assert not saver.is_still_saving(6)
    saver.close()


def test_a_failed_save_is_logged_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "checkpoints"
    coordinator = RecordingCoordinator()
    saver = saver_of(LocalStorage(directory), coordinator)
    directory.rmdir()
    directory.write_text("in the way")
    with caplog.at_level(logging.ERROR):
        assert saver.save_if_due(make(1), 1, ORIGIN)
        files = (StoredFile(name="a", bytes=1, sha256="0" * 64),)
        saver.on_order(AcceptCheckpoint(term=1, generation=1, step=1, name="../../etc", files=files))
        saver.on_order(PruneCheckpoints(term=1, names=("../../etc",)))
        saver.close()
    logged = [record.getMessage() for record in caplog.records]
    assert [
        next(words for words in ("failed", "is not sealed", "not be removed") if words in line) for line in logged
    ] == [
        "failed",
        "is not sealed",
        "not be removed",
    ]
    coordinator.next(CheckpointUnwritten)
    assert coordinator.messages.empty()


class FullStorage(LocalStorage):
    """A disk with room for only the first N files."""

    room = 0

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        self.room -= 1
        if self.room < 0:
            super().write(path, self._until_full(chunks))
        super().write(path, chunks)

    @staticmethod
    def _until_full(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        yield next(iter(chunks))[:7]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("room", [0, 1, "injected", "manifest"])
def test_a_full_disk_leaves_no_partial_checkpoint_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int | str
) -> None:
    coordinator, faults, storage = RecordingCoordinator(), Faults(lambda: None), FullStorage(tmp_path)
    storage.room = room if isinstance(room, int) else 2
    saver = saver_of(storage, coordinator, at_disk=faults.strike_at_disk)
    if room == "injected":
        faults.on_inject(Inject(fault="disk-full"))
    with caplog.at_level(logging.ERROR):
        assert saver.save_if_due(make(1), 1, ORIGIN)
        if room == "manifest":
            saver.on_order(accepted(coordinator.next(CheckpointWritten)))
        unwritten = coordinator.next(CheckpointUnwritten)
    (record,) = (record for record in caplog.records if record.name.startswith("holdfast"))
    assert record.getMessage().endswith("No space left on device")
    assert (unwritten.term, unwritten.generation, unwritten.step) == (2, 1, 1)
    assert unwritten.why.endswith("No space left on device")
    assert coordinator.messages.empty()
    assert checkpoint_dir.find_checkpoints(storage) == []
    saver.on_order(PruneCheckpoints(term=1, names=(unwritten.name,)))  # The coordinator answers with this order.
    saver.close()
    assert saver.is_idle
    assert list(tmp_path.iterdir()) == []


def test_invalid_intervals_and_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="checkpoint_every is 0"):
        saver_of(LocalStorage(tmp_path), RecordingCoordinator(), every=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="cannot be made"):
        saver_of(LocalStorage(tmp_path / "file" / "x"), RecordingCoordinator())
