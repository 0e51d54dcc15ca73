from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import BadInputError
from holdfast.protocol import checkpoint_dir
from holdfast.protocol.checkpoint_dir import DamagedCheckpointError
from holdfast.protocol.checkpoint_names import CheckpointName
from holdfast.protocol.messages.orders import AcceptCheckpoint, Inject, PruneCheckpoints
from holdfast.protocol.messages.worker import CheckpointKept, CheckpointWritten
from holdfast.runtime.checkpoints import saver as checkpoint
from holdfast.runtime.checkpoints.saver import CheckpointSaver, begin_save, load_checkpoint
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.state.hashing import state_hash
from holdfast.runtime.state.state import TrainingState

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
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


class Told:
    """A coordinator that hears and says nothing by itself."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Any] = queue.Queue()

    def next(self, kind: type[Any]) -> Any:
        message = self.messages.get(timeout=DEADLINE_S)
        assert isinstance(message, kind)
        return message


def save(directory: Path, state: TrainingState, step: int) -> str:
    told = Told()
    saver = CheckpointSaver(directory=directory, worker="n/0/a", every=1, tell=told.messages.put)
    assert saver.offer(state, step, (2, 1))
    written = told.next(CheckpointWritten)
    assert (written.step, written.term, written.generation) == (step, 2, 1)
    saver.obey(accepted(written))
    kept = told.next(CheckpointKept)
    saver.close()
    assert kept.bytes == written.bytes > 0
    return kept.name


def accepted(written: CheckpointWritten) -> AcceptCheckpoint:
    return AcceptCheckpoint(term=written.term, generation=written.generation, step=written.step, name=written.name)


def test_state_comes_back_in_every_bit(tmp_path: Path) -> None:
    source, target = make(3), make(0)
    name = save(tmp_path, source, 3)
    assert load_checkpoint(tmp_path, name, target) == 3
    assert state_hash(target.capture()) == state_hash(source.capture())


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are written later, while training changes the tensors in place: none of that may get in."""
    source, target = make(3), make(0)
    before = state_hash(source.capture())
    release = threading.Event()
    honest = checkpoint.FileSystemWriter.write_data

    def held(*args: Any, **options: Any) -> Any:
        assert release.wait(DEADLINE_S)
        return honest(*args, **options)

    monkeypatch.setattr(checkpoint.FileSystemWriter, "write_data", held)
    name = CheckpointName(term=1, generation=1, step=3, nonce="ab")
    upload = begin_save(tmp_path / name.writing, source.capture())
    train(source.model, source.optimizers.by_name[""])
    assert state_hash(source.capture()) != before
    release.set()
    upload.result(DEADLINE_S)
    checkpoint_dir.write_manifest(tmp_path / name.writing, 3)
    checkpoint_dir.keep(tmp_path, name)
    load_checkpoint(tmp_path, name.final, target)
    assert state_hash(target.capture()) == before


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    source, target = make(3), make(0)
    (tmp_path / save(tmp_path, source, 3)).rename(tmp_path / "step-00000003")
    assert load_checkpoint(tmp_path, "step-00000003", target) == 3
    assert state_hash(target.capture()) == state_hash(source.capture())


@pytest.mark.parametrize("wakes_first", [True, False])
def test_an_expelled_writer_that_wakes_up_harms_nobody(tmp_path: Path, *, wakes_first: bool) -> None:
    """Reproducer fence.py: AcceptCheckpoint of the abandoned lineage lay in its socket."""
    told, decided, target = Told(), make(3), make(0)
    old = CheckpointSaver(directory=tmp_path, worker="n0/0/a", every=1, tell=told.messages.put)
    assert old.offer(make(1), 3, (1, 1))
    order = accepted(told.next(CheckpointWritten))
    if wakes_first:
        old.obey(order)
        told.next(CheckpointKept)
    name = save(tmp_path, decided, 3)
    if not wakes_first:
        old.obey(order)
    old.close()
    load_checkpoint(tmp_path, name, target)
    assert state_hash(target.capture()) == state_hash(decided.capture())
    assert checkpoint_dir.find_checkpoints(tmp_path)[-1].final == name


def test_only_its_own_files_are_renamed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told, other = Told(), Told()
    writer = CheckpointSaver(directory=tmp_path, worker="n0/0/a", every=1, tell=told.messages.put)
    stranger = CheckpointSaver(directory=tmp_path, worker="n1/0/a", every=1, tell=other.messages.put)
    assert writer.offer(make(1), 3, (1, 1))
    written = told.next(CheckpointWritten)
    stranger.obey(accepted(written))
    stranger.close()
    assert "none of this worker's" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [written.name]
    writer.close()


def test_only_what_the_coordinator_names_is_removed(tmp_path: Path) -> None:
    names = [save(tmp_path, make(step), step) for step in (1, 2, 3)]
    saver = CheckpointSaver(directory=tmp_path, worker="n/0/a", every=1, tell=print)
    saver.obey(PruneCheckpoints(term=1, names=(names[1],)))
    saver.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [names[0], names[2]]


def test_what_was_accepted_twice_is_told_twice(tmp_path: Path) -> None:
    """A coordinator that took over does not know what the one before it has heard."""
    told = Told()
    saver = CheckpointSaver(directory=tmp_path, worker="n/0/a", every=1, tell=told.messages.put)
    assert saver.offer(make(1), 1, (1, 1))
    order = accepted(told.next(CheckpointWritten))
    saver.obey(order)
    saver.obey(order)
    assert told.next(CheckpointKept) == told.next(CheckpointKept)
    saver.close()


def test_a_saver_is_idle_only_once_it_has_told_what_it_kept(tmp_path: Path) -> None:
    """Who waits for that finishes next, and then its process may be ended."""
    told, idle = Told(), list[bool]()

    def tell(message: CheckpointWritten | CheckpointKept) -> None:
        idle.append(saver.idle)
        told.messages.put(message)

    saver = CheckpointSaver(directory=tmp_path, worker="n/0/a", every=1, tell=tell)
    assert saver.offer(make(1), 1, (1, 1))
    saver.obey(accepted(told.next(CheckpointWritten)))
    saver.close()
    assert idle == [False, False]
    assert saver.idle


def test_what_was_written_before_a_roll_back_is_waited_for_no_longer(tmp_path: Path) -> None:
    told = Told()
    saver = CheckpointSaver(directory=tmp_path, worker="n/0/a", every=1, tell=told.messages.put)
    assert saver.offer(make(1), 1, (1, 1))
    told.next(CheckpointWritten)
    saver.abandon()
    saver.close()
    assert saver.idle
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_cut_short_touches_nothing(tmp_path: Path) -> None:
    name = save(tmp_path, make(3), 3)
    largest = max((tmp_path / name).iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    target = make(0)
    before = state_hash(target.capture())
    with pytest.raises(DamagedCheckpointError, match="cut short"):
        load_checkpoint(tmp_path, name, target)
    assert state_hash(target.capture()) == before


def test_a_checkpoint_of_another_model_is_bad_input(tmp_path: Path) -> None:
    name = save(tmp_path, make(3), 3)
    with pytest.raises(BadInputError, match="not of this model"):
        load_checkpoint(tmp_path, name, make(0, width=9))


def test_one_at_a_time_and_only_when_due(tmp_path: Path) -> None:
    release = threading.Event()

    def held(path: Path, step: int) -> int:
        assert release.wait(DEADLINE_S)
        return checkpoint_dir.write_manifest(path, step)

    told = Told()
    saver = CheckpointSaver(directory=tmp_path, worker="n/0/a", every=2, tell=told.messages.put, seal=held)
    state = make(1)
    assert saver.idle
    assert not saver.offer(state, 1, (1, 1))
    assert saver.offer(state, 2, (1, 1))
    assert not saver.offer(state, 4, (1, 1))
    assert not saver.idle
    release.set()
    written = told.next(CheckpointWritten)
    assert not saver.idle
    idle = threading.Event()
    saver.notify(lambda: idle.set() if saver.idle else None)
    saver.obey(accepted(written))
    assert idle.wait(DEADLINE_S)
    saver.close()


def test_a_failed_save_is_logged_and_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "checkpoints"
    told = Told()
    saver = CheckpointSaver(directory=directory, worker="n/0/a", every=1, tell=told.messages.put)
    directory.rmdir()
    directory.write_text("in the way")
    with caplog.at_level(logging.ERROR):
        assert not saver.offer(make(1), 1, (1, 1))
        saver.obey(AcceptCheckpoint(term=1, generation=1, step=1, name="../../etc"))
        saver.obey(PruneCheckpoints(term=1, names=("../../etc",)))
        saver.close()
    assert len(caplog.records) == 3
    assert told.messages.empty()


@pytest.mark.parametrize("where", ["begin", "write", "injected"])
def test_a_full_disk_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """torch's own error is no Exception: it ended the worker that waited for the last checkpoint."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if where != "injected":
        monkeypatch.setattr(checkpoint.FileSystemWriter, "write_data", full)
    if where == "begin":
        monkeypatch.setattr(Path, "write_bytes", full)
    told, faults = Told(), Faults(lambda: None)
    tell = told.messages.put
    saver = CheckpointSaver(directory=tmp_path, worker="n/0/a", every=1, tell=tell, at_disk=faults.at_disk)
    if where == "injected":
        faults.order(Inject(fault="disk-full"))
    with caplog.at_level(logging.ERROR):
        assert saver.offer(make(1), 1, (1, 1)) is (where != "begin")
        saver.await_free()
    assert saver.idle
    (record,) = (record for record in caplog.records if record.name.startswith("holdfast"))
    assert record.getMessage().endswith("No space left on device")
    saver.close()
    assert told.messages.empty()
    assert list(tmp_path.iterdir()) == []


def test_wrong_numbers_and_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="checkpoint_every is 0"):
        CheckpointSaver(directory=tmp_path, worker="n/0/a", every=0, tell=print)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="cannot be made"):
        CheckpointSaver(directory=tmp_path / "file" / "x", worker="n/0/a", every=1, tell=print)
