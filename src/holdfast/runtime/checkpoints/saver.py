"""The persistent tier: saves the state in the background, part by part, readable at any world size."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import torch

from holdfast.control.link.checkpoints.store import PartToWrite
from holdfast.coordination.worker.requests import is_save_due
from holdfast.errors import BadInputError
from holdfast.protocol.checkpoints import directory as checkpoint_dir
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError
from holdfast.protocol.checkpoints.names import CheckpointName, parse_name
from holdfast.protocol.commit import Wish
from holdfast.protocol.messages.orders import AcceptCheckpoint, PruneCheckpoints
from holdfast.protocol.messages.worker import CheckpointUnwritten
from holdfast.protocol.names import MALFORMED
from holdfast.protocol.plan import GenerationPlan
from holdfast.protocol.state import seal_of
from holdfast.runtime.checkpoints.best import BestChoice, BestStates, Rating
from holdfast.runtime.checkpoints.changed_settings import changed_frozen, changed_settings
from holdfast.runtime.checkpoints.global_terms import decode_manifest, encode_manifest, localize_manifest
from holdfast.runtime.checkpoints.parts import copy_part, part_name, stored_names
from holdfast.runtime.checkpoints.stored_tensors import load_tensors, open_verified
from holdfast.runtime.data.sampling import StepSizes
from holdfast.runtime.dtensor.replica_position import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.moe.expert_shards.job_experts import JobExperts
from holdfast.runtime.moe.expert_shards.saving import empty_rows, row_name
from holdfast.runtime.moe.expert_shards.shards import LayerSpec
from holdfast.runtime.state.state import StateMismatchError, StateView, TrainingState
from holdfast.storage import Chunk, Storage, error_text

logger = logging.getLogger(__name__)

#: name of the state's manifest, next to the parts
STATE = "state.msgpack"
#: name of the description of the experts' tensors
EXPERTS = "experts.msgpack"
#: name of the sample settings
SAMPLES = "samples.json"

_MAX_BESIDE_BYTES = 256 << 20


class SampleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that determine a step's samples.

    With other settings, a resumed job would use some samples twice and leave others out.
    """

    global_batch: int
    length: int
    seed: int

    @classmethod
    def from_order(cls, order: StepSizes) -> SampleSettings:
        """Return the settings of a job's order of samples."""
        return cls(global_batch=order.global_batch, length=order.length, seed=order.seed)

    def describe_differences(self, other: SampleSettings) -> list[str]:
        """Return how the settings of a checkpoint, `other`, differ from these, one text for each setting, such as "seed
        was 1 and is 2".
        """
        names = {"global_batch": "global_batch", "length": "samples in the data set", "seed": "seed"}
        pairs = [(words, getattr(other, name), getattr(self, name)) for name, words in names.items()]
        return [f"{words} was {theirs} and is {mine}" for words, theirs, mine in pairs if theirs != mine]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """Experts that one worker saves."""

    #: the tensors and values of each layer
    specs: tuple[LayerSpec, ...]
    #: the live rows by name
    rows: dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartShare:
    """The part of a checkpoint that a worker saves."""

    #: of the plan under which the step was applied
    term: int
    generation: int
    #: the worker's rank in the plan
    rank: int = 0
    #: number of the plan's members
    world: int = 1
    #: of the plan, different in every run of the job
    seal: str = ""

    @classmethod
    def of_member(cls, plan: GenerationPlan, worker: str) -> PartShare:
        """Return the share of one member of a plan."""
        rank, seal = plan.rank(worker) or 0, seal_of(plan.secret).hex()[:8]
        return cls(term=plan.term, generation=plan.generation, rank=rank, world=len(plan.members), seal=seal)

    def checkpoint_name(self, step: int) -> CheckpointName:
        """Return the name of a step's checkpoint, the same for all members of the plan."""
        return CheckpointName(term=self.term, generation=self.generation, step=step, nonce=self.seal)


class PartSink(Protocol):
    """Writes a worker's parts: to its agent, or directly to the storage without an agent."""

    @property
    def is_free(self) -> bool: ...

    def write(self, part: PartToWrite) -> None: ...

    def close(self) -> None: ...


class CheckpointSaver:
    """Saves one worker's part of every checkpoint; the training thread only waits for the copy."""

    def __init__(
        self,
        *,
        storage: Storage,
        worker: str,
        every: int | None,
        sink: PartSink,
        send: Callable[[CheckpointUnwritten], None],
        forward_order: Callable[[AcceptCheckpoint | PruneCheckpoints], None] = lambda order: None,
        samples: SampleSettings | None = None,
        position: ReplicaPosition = WHOLE_REPLICA,
    ) -> None:
        """Check the checkpoint directory.

        Args:
            every: steps between checkpoints; None if the coordinator decides when.
            send: sends a message to the coordinator.
            forward_order: called with each order about a checkpoint, after the saver has handled it.
            samples: the job's settings, to be saved and compared; None for neither.
            position: the part of a replica on this worker.

        Raises:
            BadInputError: the directory is not usable, or `every` is below 1.
        """
        if every is not None and every < 1:
            raise BadInputError(f"checkpoint_every is {every}: it must be at least 1")
        storage.check()
        self.storage = storage
        self._worker = worker
        self._every = every
        self._samples = samples
        self._position = position
        self._sink = sink
        self._send = send
        self._forward_order = forward_order
        self._lock = threading.Lock()
        #: the newest written part that waits for the coordinator's decision
        self._pending: CheckpointName | None = None
        #: the newest complete checkpoint, or a checkpoint loaded since
        self._newest: CheckpointName | None = None
        self._best = BestStates(storage)
        #: the step of the state that was rated last as one of the best, or 0
        self._rated_step = 0
        self._on_idle: Callable[[], None] = lambda: None
        self._later = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdfast-best")

    @property
    def is_idle(self) -> bool:
        """Whether no written part waits for the coordinator's decision."""
        with self._lock:
            return self._pending is None

    @property
    def is_saving_best(self) -> bool:
        """Whether a state that was rated as one of the best is being saved."""
        with self._lock:
            return self._pending is not None and self._pending.step == self._rated_step

    @property
    def saved_step(self) -> int:
        """The step of the newest complete checkpoint, or of a checkpoint loaded since; 0 if there is neither."""
        with self._lock:
            return self._newest_step

    def is_still_saving(self, step: int) -> bool:
        """Return whether this worker's part of an earlier checkpoint prevents saving after `step`, on all workers."""
        return (self.is_timed or self.is_due(step)) and not self._sink.is_free

    @property
    def is_timed(self) -> bool:
        """Whether the coordinator decides when a checkpoint is due, instead of the step's number."""
        return self._every is None

    def set_on_idle(self, on_idle: Callable[[], None]) -> None:
        """Set a function that is called, from another thread, whenever `is_idle` may have become true."""
        self._on_idle = on_idle

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint of this step is due: the same on all workers."""
        return self._every is not None and step % self._every == 0

    def save_if_due(
        self,
        state: TrainingState,
        step: int,
        share: PartShare,
        wishes: Collection[Wish] = (),
        experts: Callable[[], ExpertRows] | None = None,
    ) -> bool:
        """Copy the state of `step` if a checkpoint is due, and return whether it is being saved.

        Called by the training thread; the state must not change until it returns.

        Args:
            share: which part this worker saves.
            wishes: the wishes in the step result, which decide with `is_due`. All workers leave a due checkpoint out if
                some worker's part of the one before is still being written.
            experts: returns the experts that this worker saves.
        """
        return is_save_due(wishes, due=self.is_due(step)) and self.save(state, step, share, experts)

    def has_saved(self, step: int, share: PartShare) -> bool:
        """Return whether a step's checkpoint is complete, or this worker's part of it is being saved."""
        with self._lock:
            return self._newest_step == step or self._pending == share.checkpoint_name(step)

    def save(
        self, state: TrainingState, step: int, share: PartShare, experts: Callable[[], ExpertRows] | None = None
    ) -> bool:
        """Copy this worker's part of the state of `step`, due or not, and give it to the sink, which writes it later;
        rank 0 adds the small files. The state must not change until this returns.

        Return False if the copy does not fit into memory, which is logged and reported.

        Args:
            share: which part this worker saves.
            experts: returns the experts that this worker saves; None: none.
        """
        started = time.monotonic()
        view, rows = state.capture(), experts() if experts is not None else None
        try:
            among = self._position.role_position(share.rank, share.world)
            part = copy_part(view, *among, rows.rows if rows is not None else None, self._position)
        except (RuntimeError, MemoryError) as error:
            logger.error("the checkpoint of step %d is left out, its copy does not fit into memory: %s", step, error)
            self.report_unwritten(step, share, f"the copy does not fit into memory: {error}"[:1000])
            return False
        with self._lock:
            self._pending = share.checkpoint_name(step)
        self._sink.write(
            PartToWrite(
                name=share.checkpoint_name(step),
                worker=self._worker,
                files={
                    **(side_files(view, rows, self._samples) if share.rank == 0 else {}),
                    part_name(share.rank, share.world): part.chunks,
                },
                part=share.rank,
                parts=share.world,
                stall_s=time.monotonic() - started,
                begun=started,
            )
        )
        return True

    def report_unwritten(self, step: int, share: PartShare, why: str) -> None:
        """Report to the coordinator that this worker does not save its part of a step, and why, so that the coordinator
        does not wait for it.
        """
        name = share.checkpoint_name(step)
        self._send(
            CheckpointUnwritten(
                worker=self._worker,
                term=name.term,
                generation=name.generation,
                step=step,
                name=name.folder,
                why=why,
            )
        )

    def rate_state(self, rating: Rating, choice: BestChoice) -> None:
        """Add the rating of a step's state, in another thread: its checkpoint is kept, once complete, as long as it is
        one of the best.
        """
        with self._lock:
            self._rated_step = rating.step
        self._run_later(self._best.add_rating, rating, choice)

    def load(
        self,
        name: str,
        state: TrainingState,
        experts: JobExperts | None = None,
        wanted: Sequence[Sequence[int]] = (),
        *,
        first: bool,
    ) -> int:
        """Load a checkpoint as `load_checkpoint`, and its experts as `load_experts`, with their errors; return its
        step. A NaN in an intact checkpoint counts as damage.

        Args:
            experts: of this worker.
            wanted: the experts of each layer that it will host.
            first: whether to warn if settings of the checkpoint differ from the script's. False for a worker that has
                trained: the checkpoint reverts its settings together with its steps.
        """
        settings, frozen = state.optimizers.settings(), state.frozen_parameters()
        step = load_checkpoint(self.storage, name, state, self._samples, self._position)
        if first:
            for warning in (*changed_settings(settings, state.optimizers.settings()), changed_frozen(frozen, state)):
                if warning:
                    logger.warning("%s", warning)
        if experts is not None:
            load_experts(self.storage, name, experts, wanted)
        if bad := state.find_nan():
            raise DamagedCheckpointError(f"{bad} contains a NaN")
        return step

    def on_loaded(self, name: str) -> None:
        """No longer wait for the decision about the last written part, because the state was replaced, and make the
        loaded checkpoint the newest one.

        Args:
            name: the checkpoint from which the state came; "" for another source: then no newest checkpoint is known.
        """
        with self._lock:
            self._newest = parse_name(name) if name else None
            self._pending = None
        self._on_idle()

    def on_order(self, order: AcceptCheckpoint | PruneCheckpoints) -> None:
        """Handle the coordinator's order about a checkpoint, and forward it. A complete checkpoint (no files left to
        write) becomes the newest one, in another thread; pruned ones are forgotten. If files are left to write, the
        order is only forwarded.
        """
        if isinstance(order, AcceptCheckpoint) and not order.files:
            self._run_later(self._on_complete, order)
        elif isinstance(order, PruneCheckpoints):
            for name in order.names:
                self._clear_pending(name)
                self._forget_checkpoint(name)
            self._on_idle()
        self._forward_order(order)

    def close(self) -> None:
        """Wait for everything that is being written."""
        self._sink.close()
        self._later.shutdown(wait=True)

    def _on_complete(self, order: AcceptCheckpoint) -> None:
        """Handle a complete checkpoint: keep it if it was rated as one of the best, then no longer wait for it, and
        make it the newest one, unless a newer one is known. In this order, because the process may end afterwards.
        """
        try:
            self._best.on_complete(order.step)
        finally:  # Otherwise the training thread could wait for this checkpoint forever.
            self._clear_pending(order.name)
            with self._lock:
                if order.step >= self._newest_step:
                    self._newest = parse_name(order.name)
            self._on_idle()

    def _clear_pending(self, name: str) -> None:
        """No longer wait for the decision about a checkpoint with this folder."""
        with self._lock:
            if self._pending is not None and self._pending.folder == name:
                self._pending = None

    def _forget_checkpoint(self, name: str) -> None:
        """Forget the checkpoint in this folder, if it is the newest one: another worker may have found it damaged. Then
        no newest checkpoint is known.
        """
        with self._lock:
            if self._newest is not None and self._newest.folder == name:
                self._newest = None

    @property
    def _newest_step(self) -> int:
        return self._newest.step if self._newest is not None else 0

    def _run_later(self, do: Callable[..., None], *arguments: object) -> None:
        """Call a function in the saver's other thread, after earlier calls; nothing if the saver is closed."""
        with contextlib.suppress(RuntimeError):  # The executor is closed, because the process ends.
            self._later.submit(do, *arguments)


def side_files(
    view: StateView, experts: ExpertRows | None, samples: SampleSettings | None
) -> dict[str, Callable[[], Iterable[Chunk]]]:
    """Return functions that yield the content of a checkpoint's small files, by name: the manifest of the state, and
    the sample settings and the description of experts if they are given.
    """
    contents = {STATE: encode_manifest(view.manifest)}
    if samples is not None:
        contents[SAMPLES] = msgspec.json.encode(samples)
    if experts is not None:
        contents[EXPERTS] = msgspec.msgpack.encode(experts.specs)
    return {name: partial(iter, (content,)) for name, content in contents.items()}


def load_checkpoint(
    storage: Storage,
    name: str,
    state: TrainingState,
    samples: SampleSettings | None = None,
    position: ReplicaPosition = WHOLE_REPLICA,
) -> int:
    """Load a checkpoint into the model, the optimizer and the extra objects, and return its step.

    The state is only changed after the description of the checkpoint was found to be of this model, and all files to be
    intact. But remote files are verified only when they are read: an error may leave a partly changed state.

    Args:
        samples: the job's settings; None: not compared.
        position: the part of a replica on this worker, under any layout of the checkpoint.

    Raises:
        DamagedCheckpointError: it is not intact.
        BadInputError: it is of another model, optimizer or extra, or of a job with other samples.
    """
    checkpoint = parse_name(name).folder
    step = checkpoint_dir.verify(storage, checkpoint, contents=storage.local)
    where = f"{storage.where}/{checkpoint}"
    data = read_side_file(storage, checkpoint, STATE)
    try:
        manifest = decode_manifest(data)
    except MALFORMED as error:
        raise DamagedCheckpointError(f"{name}/{STATE} cannot be read: {error}") from None
    if samples is not None:
        _check_samples(storage, checkpoint, where, samples)
    try:
        manifest, parts = localize_manifest(state, manifest, position)
        tensors = state.prepare(manifest)
    except StateMismatchError as error:
        raise BadInputError(f"checkpoint {where} is not of this model: {error}") from None
    names = stored_names(manifest)
    wanted = {names[number]: part for number, part in parts.items()}
    load_tensors(storage, checkpoint, dict(zip(names, tensors, strict=True)), wanted)
    try:
        state.adopt(manifest, tensors)
    except StateMismatchError as error:
        raise DamagedCheckpointError(f"{name}/{STATE} does not fit: {error}") from None
    return step


def _check_samples(storage: Storage, checkpoint: str, where: str, samples: SampleSettings) -> None:
    """Refuse to resume with other samples; a checkpoint without sample settings is accepted.

    Args:
        where: the checkpoint's full path, for the error.
        samples: the job's settings.

    Raises:
        BadInputError: the settings differ.
        DamagedCheckpointError: the settings cannot be read.
    """
    if SAMPLES not in storage.entries(checkpoint):
        return
    try:
        written = msgspec.json.decode(read_side_file(storage, checkpoint, SAMPLES), type=SampleSettings)
    except MALFORMED as error:
        raise DamagedCheckpointError(f"{checkpoint}/{SAMPLES} cannot be read: {error}") from None
    if differences := samples.describe_differences(written):
        raise BadInputError(
            f"checkpoint {where} is of a job with other samples: {', '.join(differences)}; resumed, it would use some "
            "twice and leave others out: give the same ones, or another checkpoint directory"
        )


def load_experts(storage: Storage, name: str, experts: JobExperts, wanted: Sequence[Sequence[int]]) -> None:
    """Load the rows of the experts that a worker will host, from any world size, and make them its experts.
    `load_checkpoint` has checked the files.

    Args:
        wanted: the experts of each layer.

    Raises:
        DamagedCheckpointError: a file cannot be read or does not match, or an expert is missing.
        BadInputError: it is of another model.
    """
    checkpoint = parse_name(name).folder
    try:
        specs = msgspec.msgpack.decode(read_side_file(storage, checkpoint, EXPERTS), type=tuple[LayerSpec, ...])
    except MALFORMED as error:
        raise DamagedCheckpointError(f"{name}/{EXPERTS} cannot be read: {error}") from None
    if [layer.weights for layer in specs] != [layer.weights for layer in experts.describe_layers()]:
        raise BadInputError(
            f"checkpoint {storage.where}/{name} is not of this model: its MoE layers have other experts"
        )
    rows = empty_rows(specs, wanted, experts.layers[0].experts.device)
    targets = {row_name(layer, *key): tensor for layer, row in enumerate(rows) for key, tensor in row.items()}
    load_tensors(storage, checkpoint, targets)
    experts.adopt(wanted, specs, rows)


def read_side_file(storage: Storage, checkpoint: str, name: str) -> bytes:
    """Return the content of one of a checkpoint's small files, such as `STATE`. Its hash is only compared on remote
    storage, because local files were verified before.

    Raises:
        DamagedCheckpointError: it is missing, too large or not readable, or has other content.
    """
    _, files = checkpoint_dir.read_manifest(storage, checkpoint)
    file = next((file for file in files if file.name == name), None)
    if file is None or file.bytes > _MAX_BESIDE_BYTES:
        raise DamagedCheckpointError(f"{checkpoint} has no {name}, or one that is too large")
    try:
        with open_verified(storage, checkpoint, file) as stream:
            return stream.read(file.bytes)
    except OSError as error:
        raise DamagedCheckpointError(f"{checkpoint}/{name} cannot be read: {error_text(error)}") from None
