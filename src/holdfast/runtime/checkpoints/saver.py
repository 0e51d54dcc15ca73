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
from typing import Any, cast

import msgspec
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from holdfast.errors import BadInputError
from holdfast.protocol import checkpoint_dir
from holdfast.protocol.checkpoint_dir import DamagedCheckpointError
from holdfast.protocol.checkpoint_names import CheckpointName, parse_name
from holdfast.protocol.messages.orders import AcceptCheckpoint, PruneCheckpoints
from holdfast.protocol.messages.worker import CheckpointKept, CheckpointWritten
from holdfast.runtime.checkpoints.best import BestChoice, BestStates, Rating
from holdfast.runtime.checkpoints.stored_tensors import first_cause, load_tensors
from holdfast.runtime.data.sampling import StepSizes
from holdfast.runtime.moe.holding.job_experts import JobExperts
from holdfast.runtime.moe.holding.saving import empty_rows, row_name
from holdfast.runtime.moe.holding.shards import LayerSpec
from holdfast.runtime.state.state import Manifest, StateMismatchError, StateView, TrainingState

logger = logging.getLogger(__name__)

_dcp: Any = checkpoint  # which is not typed

#: The state's manifest, beside torch's own files.
STATE = "state.msgpack"
#: What each MoE layer keeps per expert, likewise.
EXPERTS = "experts.msgpack"
#: What the samples of its steps follow from, likewise.
SAMPLES = "samples.json"


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's samples follow from: with others a resumed job would use some twice and leave others out."""

    global_batch: int
    length: int
    seed: int

    @classmethod
    def of(cls, order: StepSizes) -> Samples:
        """Return what of a job's order of samples a checkpoint must share."""
        return cls(global_batch=order.global_batch, length=order.length, seed=order.seed)

    def differences(self, other: Samples) -> list[str]:
        """Say where a checkpoint's are not these."""
        names = {"global_batch": "global_batch", "length": "samples in the data set", "seed": "seed"}
        pairs = [(said, getattr(other, name), getattr(self, name)) for name, said in names.items()]
        return [f"{said} was {theirs} and is {mine}" for said, theirs, mine in pairs if theirs != mine]


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
        samples: Samples | None = None,
        seal: Callable[[Path, int], int] = checkpoint_dir.write_manifest,
        at_disk: Callable[[], None] = lambda: None,
    ) -> None:
        """Make sure that the directory is there.

        Args:
            every: steps between checkpoints.
            tell: sends a message to the coordinator; thread-safe.
            samples: those of the job, to be written down and compared; None for neither.
            seal: makes what is written whole, as that of a step, and returns its bytes.
            at_disk: called while something is written; an OSError of it is the disk's.

        Raises:
            BadInputError: the directory is not usable, or a number makes no sense.
        """
        if every < 1:
            raise BadInputError(f"checkpoint_every is {every}: it must be at least 1")
        checkpoint_dir.make_directory(directory)
        self.directory = directory
        self._worker = worker
        self._every = every
        self._tell = tell
        self._samples = samples
        self._seal = seal
        self._at_disk = at_disk
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdfast-checkpoint")
        self._saving: Future[None] | None = None
        #: the step of the newest checkpoint that was begun or loaded here
        self.newest = 0
        #: what waits for the coordinator's answer, and the newest that was kept
        self._written: dict[CheckpointName, CheckpointWritten] = {}
        self._kept: CheckpointKept | None = None
        self._best = BestStates(directory)
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

    def free(self, step: int, *, wait: bool = False) -> bool:
        """Return whether the one before is written, so that another can be; says so where not.

        Args:
            wait: until it is.
        """
        if wait:
            self.await_free()
        if self._saving is not None and not self._saving.done():
            logger.warning("the checkpoint of step %d is left out: the one before it is still being written", step)
            return False
        return True

    def await_free(self) -> None:
        """Wait until the one before is written: the last checkpoint is never the one that is left out."""
        if self._saving is not None:
            self._saving.result()

    def offer(self, state: TrainingState, step: int, origin: tuple[int, int], *, asked: bool = False) -> bool:
        """The state is that of `step` now: snapshot it if a checkpoint is due, and return whether one is under way.

        Called by the training thread; the state must not change until it returns.

        Args:
            origin: term and generation of the plan under which the step was applied.
            asked: one is due, whatever the step is, and the one before is waited for.
        """
        return (asked or self.due(step)) and self.free(step, wait=asked) and self.save(state, step, origin)

    def save(self, state: TrainingState, step: int, origin: tuple[int, int], experts: ExpertRows | None = None) -> bool:
        """As `offer`, due or not; the one before is written. `experts`: those of all ranks, where there are any."""
        started = time.monotonic()
        term, generation = origin
        name = CheckpointName(term=term, generation=generation, step=step, nonce=secrets.token_hex(4))
        try:
            upload = begin_save(self.directory / name.writing, state.capture(), experts, self._samples)
        except OSError as error:
            logger.error("the checkpoint of step %d could not be begun: %s", step, error)
            shutil.rmtree(self.directory / name.writing, ignore_errors=True)
            return False
        self.newest = step
        stall_s = time.monotonic() - started
        self._saving = self._thread.submit(self._complete, upload, name, (started, stall_s))
        self._saving.add_done_callback(lambda _: self._on_idle())
        return True

    def rate(self, rating: Rating, choice: BestChoice) -> None:
        """The state of a step was evaluated: keep its checkpoint, once it is accepted, while it is one of the best."""
        self._thread.submit(self._best.rate, rating, choice)

    def load(self, name: str, state: TrainingState, *, first: bool) -> int:
        """As `load_checkpoint`; the first rank says where the checkpoint's learning rates are not the script's."""
        mine = state.optimizers.learning_rates()
        step = load_checkpoint(self.directory, name, state, self._samples)
        theirs = state.optimizers.learning_rates()
        if first and mine != theirs:
            logger.warning("the checkpoint's learning rate %s is used, not the script's %s", theirs, mine)
        return step

    def obey(self, order: AcceptCheckpoint | PruneCheckpoints) -> None:
        """In the background: give a checkpoint its final name, or remove what will not be used any more."""
        if isinstance(order, AcceptCheckpoint):
            self._thread.submit(self._accept, order)
        else:
            self._thread.submit(self._prune, order.names)

    def abandon(self) -> None:
        """The state went back to a checkpoint: what was written since is nobody's any more."""
        self._thread.submit(self._prune, [name.writing for name in self._written])

    def close(self) -> None:
        """Wait for what is under way."""
        self._thread.shutdown(wait=True)

    # ---- in the saver's thread ----

    def _complete(self, upload: Future[object], name: CheckpointName, times: tuple[float, float]) -> None:
        """Make it whole and tell. `times`: when it was begun, and how long training stood for it."""
        started, stall_s = times
        try:
            upload.result()
            self._at_disk()
            size = self._seal(self.directory / name.writing, name.step)
        except (Exception, CheckpointException) as error:  # noqa: BLE001
            # Whatever stops a save (a full disk, torch's own errors): training is worth more than a checkpoint.
            why = first_cause(error) if isinstance(error, CheckpointException) else error
            logger.error("the checkpoint of step %d failed: %s: %s", name.step, type(error).__name__, why)
            shutil.rmtree(self.directory / name.writing, ignore_errors=True)
            return
        written = CheckpointWritten(
            worker=self._worker,
            term=name.term,
            generation=name.generation,
            step=name.step,
            name=name.writing,
            bytes=size,
            seconds=time.monotonic() - started,
            stall_s=stall_s,
        )
        self._written[name] = written
        self._tell(written)

    def _accept(self, order: AcceptCheckpoint) -> None:
        name = next((name for name in self._written if name.writing == order.name), None)
        if name is not None:
            self._keep(name, self._written[name])
        elif self._kept is not None and _origin(self._kept) == _origin(order):
            self._tell(self._kept)  # it was told before, to a coordinator that did not live to write it down
        else:
            logger.error("the checkpoint %s is not kept: it is none of this worker's", order.name)

    def _keep(self, name: CheckpointName, written: CheckpointWritten) -> None:
        try:
            checkpoint_dir.keep(self.directory, name)
        except (OSError, DamagedCheckpointError) as error:
            logger.error("the checkpoint %s could not be kept: %s", name.writing, error)
        else:
            self._kept = CheckpointKept(
                worker=self._worker,
                term=name.term,
                generation=name.generation,
                step=name.step,
                name=name.final,
                bytes=written.bytes,
                seconds=written.seconds,
                stall_s=written.stall_s,
            )
            self._best.look(name.step)
            self._tell(self._kept)
            checkpoint_dir.remove_unfinished(self.directory, name)
        # What was written before it has been passed over: it will not be accepted any more. (Only now: whoever waits
        # for `idle` says next that it has finished, and then this process may be ended.)
        self._written = {other: entry for other, entry in self._written.items() if other > name}
        self._on_idle()

    def _prune(self, names: Sequence[str]) -> None:
        self._written = {name: entry for name, entry in self._written.items() if name.writing not in names}
        try:
            checkpoint_dir.remove(self.directory, names)
        except ValueError as error:
            logger.error("checkpoints are not removed: %s", error)
        self._on_idle()


def _origin(message: CheckpointKept | AcceptCheckpoint) -> tuple[int, int, int]:
    return message.term, message.generation, message.step


def begin_save(
    path: Path, view: StateView, experts: ExpertRows | None = None, samples: Samples | None = None
) -> Future[object]:
    """Copy the state, and write the copy in a background thread; the returned future ends with the writing.

    Raises:
        OSError: the directory cannot be made.
    """
    path.mkdir(parents=True)
    (path / STATE).write_bytes(msgspec.msgpack.encode(view.manifest))
    if samples is not None:
        (path / SAMPLES).write_bytes(msgspec.json.encode(samples))
    tensors = _named(view.tensors)
    if experts is not None:
        (path / EXPERTS).write_bytes(msgspec.msgpack.encode(experts.specs))
        tensors |= experts.rows
    # One writer, no process group: async_save copies all tensors before it returns.
    upload: object = _dcp.async_save(
        tensors,
        storage_writer=FileSystemWriter(path, single_file_per_rank=True, sync_files=True),
        no_dist=True,
    )
    assert isinstance(upload, Future)
    return cast(Future[Any], upload)


def load_checkpoint(directory: Path, name: str, state: TrainingState, samples: Samples | None = None) -> int:
    """Load a checkpoint into the model, the optimizer and the extra objects, and return its step.

    Nothing is touched before the checkpoint is known to be whole and of this model.

    Raises:
        DamagedCheckpointError: it is not whole.
        BadInputError: it is that of another model, optimizer or extra, or of a job with other samples.
    """
    path = directory / parse_name(name).final
    step = checkpoint_dir.verify(path)
    try:
        manifest = msgspec.msgpack.decode((path / STATE).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise DamagedCheckpointError(f"{name}/{STATE} cannot be read: {error}") from None
    _compare(path, samples)
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


def _compare(path: Path, samples: Samples | None) -> None:
    """Refuse to go on with other samples; a checkpoint of an earlier version does not say what its were."""
    if samples is None or not (path / SAMPLES).exists():
        return
    try:
        written = msgspec.json.decode((path / SAMPLES).read_bytes(), type=Samples)
    except (OSError, msgspec.DecodeError) as error:
        raise DamagedCheckpointError(f"{path.name}/{SAMPLES} cannot be read: {error}") from None
    if differences := samples.differences(written):
        raise BadInputError(
            f"checkpoint {path} is of a job with other samples: {', '.join(differences)}; resumed, it would use some "
            "twice and leave others out: give the same ones, or another checkpoint directory"
        )


def load_experts(directory: Path, name: str, experts: JobExperts, wanted: Sequence[Sequence[int]]) -> None:
    """Load those experts that a worker is to host, at any world size; `load_checkpoint` has checked the files.

    Args:
        wanted: the experts of each layer.

    Raises:
        DamagedCheckpointError: what it says of the experts cannot be read.
        BadInputError: it is that of another model.
    """
    path = directory / parse_name(name).final
    try:
        specs = msgspec.msgpack.decode((path / EXPERTS).read_bytes(), type=tuple[LayerSpec, ...])
    except (OSError, msgspec.DecodeError) as error:
        raise DamagedCheckpointError(f"{name}/{EXPERTS} cannot be read: {error}") from None
    if [layer.weights for layer in specs] != [layer.weights for layer in experts.specs()]:
        raise BadInputError(f"checkpoint {path} is not of this model: its MoE layers have other experts")
    rows = empty_rows(specs, wanted, experts.layers[0].experts.device)
    targets = {row_name(layer, *key): tensor for layer, row in enumerate(rows) for key, tensor in row.items()}
    load_tensors(path, targets)
    experts.adopt(wanted, specs, rows)


def _named(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{place:06d}": tensor for place, tensor in enumerate(tensors)}
