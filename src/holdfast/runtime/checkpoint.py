"""The persistent tier: the whole replicated state, saved in the background by one rank, readable at any world size."""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from holdfast import checkpoint_dir
from holdfast.checkpoint_dir import DamagedCheckpointError
from holdfast.errors import BadInputError
from holdfast.protocol.worker import CheckpointKept, CheckpointWritten
from holdfast.runtime.moe.saving import empty_rows, row_name
from holdfast.runtime.moe.shards import LayerSpec
from holdfast.runtime.moe.training import JobExperts
from holdfast.runtime.state import Manifest, StateMismatchError, StateView, TrainingState
from holdfast.runtime.stored_tensors import load_tensors

logger = logging.getLogger(__name__)

#: The state's manifest, beside torch's own files.
STATE = "state.msgpack"
#: What each MoE layer keeps per expert, likewise.
EXPERTS = "experts.msgpack"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """All experts of a job: what each layer keeps of them, and their rows by name."""

    specs: tuple[LayerSpec, ...]
    rows: dict[str, torch.Tensor]


class CheckpointSaver:
    """Saves every so many steps, one checkpoint at a time, never in the training thread's way but for the snapshot."""

    def __init__(
        self,
        *,
        directory: Path,
        worker: str,
        every: int,
        tell: Callable[[CheckpointWritten | CheckpointKept], None],
        keep: int = checkpoint_dir.KEEP,
    ) -> None:
        """Make sure that the directory is there.

        Args:
            every: steps between checkpoints.
            tell: sends a message to the coordinator; thread-safe.
            keep: how many of the newest stay.

        Raises:
            BadInputError: the directory is not usable, or a number makes no sense.
        """
        if every < 1 or keep < 1:
            raise BadInputError(f"checkpoint_every is {every} and {keep} are kept: both must be at least 1")
        checkpoint_dir.make_directory(directory)
        self.directory = directory
        self._worker = worker
        self._every = every
        self._tell = tell
        self._keep = keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdfast-checkpoint")
        self._saving: Future[None] | None = None
        self._written: dict[str, tuple[int, float]] = {}
        self._on_idle: Callable[[], None] = lambda: None

    @property
    def idle(self) -> bool:
        """True where nothing is being written, and nothing written waits for its final name."""
        return (self._saving is None or self._saving.done()) and not self._written

    def notify(self, on_idle: Callable[[], None]) -> None:
        """Call a function, from the saver's thread, whenever `idle` may have become true."""
        self._on_idle = on_idle

    def due(self, step: int) -> bool:
        """Return whether a checkpoint of this step is wanted: the same on all workers."""
        return step % self._every == 0

    def free(self, step: int) -> bool:
        """Return whether the one before is written, so that another can be; says so where not."""
        if self._saving is not None and not self._saving.done():
            logger.warning("the checkpoint of step %d is left out: the one before it is still being written", step)
            return False
        return True

    def offer(self, state: TrainingState, step: int, epoch: int, experts: ExpertRows | None = None) -> bool:
        """The state is that of `step` now: snapshot it if a checkpoint is due, and return whether one is under way.

        Called by the training thread; the state must not change until it returns.
        """
        if not self.due(step) or not self.free(step):
            return False
        started = time.monotonic()
        name = checkpoint_dir.writing_name(step, secrets.token_hex(8))
        try:
            upload = begin_save(self.directory / name, state.capture(), experts)
        except OSError as error:
            logger.error("the checkpoint of step %d could not be begun: %s", step, error)
            return False
        self._saving = self._thread.submit(self._complete, upload, name, step, epoch, started)
        self._saving.add_done_callback(lambda _: self._on_idle())
        return True

    def accept(self, step: int, name: str) -> None:
        """The checkpoint is on the decided lineage: give it its final name, in the background."""
        self._thread.submit(self._accept, step, name)

    def close(self) -> None:
        """Wait for what is under way."""
        self._thread.shutdown(wait=True)

    def _complete(self, upload: Future[object], name: str, step: int, epoch: int, started: float) -> None:
        try:
            upload.result()
            size = checkpoint_dir.write_manifest(self.directory / name, step)
        except Exception as error:  # noqa: BLE001
            # Whatever stops a save (a full disk, torch's own errors): training is worth more than a checkpoint.
            logger.error("the checkpoint of step %d failed: %s: %s", step, type(error).__name__, error)
            shutil.rmtree(self.directory / name, ignore_errors=True)
            return
        seconds = time.monotonic() - started
        self._written[name] = (size, seconds)
        written = CheckpointWritten(worker=self._worker, epoch=epoch, step=step, name=name, bytes=size, seconds=seconds)
        self._tell(written)

    def _accept(self, step: int, name: str) -> None:
        size, seconds = self._written.get(name, (0, 0.0))
        # What was written before it has been passed over: it will not be accepted any more.
        self._written = {other: entry for other, entry in self._written.items() if other > name}
        try:
            final = checkpoint_dir.keep(self.directory, name, step)
            checkpoint_dir.prune(self.directory, newest=self._keep)
        except (OSError, ValueError) as error:
            logger.error("the checkpoint %s could not be kept: %s", name, error)
            return
        self._tell(CheckpointKept(worker=self._worker, step=step, name=final, bytes=size, seconds=seconds))
        self._on_idle()


def begin_save(path: Path, view: StateView, experts: ExpertRows | None = None) -> Future[object]:
    """Copy the state, and write the copy in a background thread; the returned future ends with the writing.

    Raises:
        OSError: the directory cannot be made.
    """
    path.mkdir(parents=True)
    (path / STATE).write_bytes(msgspec.msgpack.encode(view.manifest))
    tensors = _named(view.tensors)
    if experts is not None:
        (path / EXPERTS).write_bytes(msgspec.msgpack.encode(experts.specs))
        tensors |= experts.rows
    # One writer, no process group: async_save copies all tensors before it returns.
    upload = async_save(
        tensors,
        storage_writer=FileSystemWriter(path, single_file_per_rank=True, sync_files=True),
        no_dist=True,
    )
    assert isinstance(upload, Future)
    return upload


def load_checkpoint(directory: Path, name: str, state: TrainingState) -> int:
    """Load a checkpoint into the model, the optimizer and the extra objects, and return its step.

    Nothing is touched before the checkpoint is known to be whole and of this model.

    Raises:
        DamagedCheckpointError: it is not whole.
        BadInputError: it is that of another model, optimizer or extra.
    """
    path = directory / checkpoint_dir.require_name(name)
    step = checkpoint_dir.verify(path)
    try:
        manifest = msgspec.msgpack.decode((path / STATE).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise DamagedCheckpointError(f"{name}/{STATE} cannot be read: {error}") from None
    try:
        tensors = state.prepare(manifest)
    except StateMismatchError as error:
        raise BadInputError(f"checkpoint {path} is not of this model: {error}") from None
    load_tensors(path, _named(tensors))
    try:
        state.adopt(manifest, tensors)
    except StateMismatchError as error:
        raise DamagedCheckpointError(f"{name}/{STATE} does not fit: {error}") from None
    return step


def load_experts(directory: Path, name: str, experts: JobExperts, wanted: Sequence[Sequence[int]]) -> None:
    """Load those experts that a worker is to host, at any world size; `load_checkpoint` has checked the files.

    Args:
        wanted: the experts of each layer.

    Raises:
        DamagedCheckpointError: what it says of the experts cannot be read.
        BadInputError: it is that of another model.
    """
    path = directory / checkpoint_dir.require_name(name)
    try:
        specs = msgspec.msgpack.decode((path / EXPERTS).read_bytes(), type=tuple[LayerSpec, ...])
    except (OSError, msgspec.DecodeError) as error:
        raise DamagedCheckpointError(f"{name}/{EXPERTS} cannot be read: {error}") from None
    if [layer.weights for layer in specs] != [layer.weights for layer in experts.specs()]:
        raise BadInputError(f"checkpoint {path} is not of this model: its MoE layers have other experts")
    rows = empty_rows(specs, wanted, experts.layers[0].experts.w1.device)
    targets = {row_name(layer, *key): tensor for layer, row in enumerate(rows) for key, tensor in row.items()}
    load_tensors(path, targets)
    experts.adopt(wanted, specs, rows)


def _named(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{place:06d}": tensor for place, tensor in enumerate(tensors)}
