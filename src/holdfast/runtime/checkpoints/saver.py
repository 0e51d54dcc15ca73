"""The persistent tier: the state, saved in the background, part by part, readable at any world size."""

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
from holdfast.coordination.worker.wishes import is_save_due
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
from holdfast.runtime.dtensor.place import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.moe.holding.job_experts import JobExperts
from holdfast.runtime.moe.holding.saving import empty_rows, row_name
from holdfast.runtime.moe.holding.shards import LayerSpec
from holdfast.runtime.state.state import StateMismatchError, StateView, TrainingState
from holdfast.storage import Chunk, Storage, error_text

logger = logging.getLogger(__name__)

#: The state's manifest, beside the parts.
STATE = "state.msgpack"
#: What each MoE layer keeps per expert, likewise.
EXPERTS = "experts.msgpack"
#: What the samples of its steps follow from, likewise.
SAMPLES = "samples.json"

_MAX_BESIDE_BYTES = 256 << 20


class SampleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's samples follow from: with others a resumed job would use some twice and leave others out."""

    global_batch: int
    length: int
    seed: int

    @classmethod
    def from_order(cls, order: StepSizes) -> SampleSettings:
        """Return what of a job's order of samples a checkpoint must share."""
        return cls(global_batch=order.global_batch, length=order.length, seed=order.seed)

    def describe_differences(self, other: SampleSettings) -> list[str]:
        """Say where a checkpoint's are not these."""
        names = {"global_batch": "global_batch", "length": "samples in the data set", "seed": "seed"}
        pairs = [(said, getattr(other, name), getattr(self, name)) for name, said in names.items()]
        return [f"{said} was {theirs} and is {mine}" for said, theirs, mine in pairs if theirs != mine]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """Experts that one worker saves: what each layer keeps of them, and their rows by name."""

    specs: tuple[LayerSpec, ...]
    rows: dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartShare:
    """Whose part of a checkpoint a worker saves. `term`, `generation`: of the plan under which the step was applied.

    `rank` and `world`: its rank in that plan, and how many members it has. `seal`: of the plan, so that no other run of
    the job has the same.
    """

    term: int
    generation: int
    rank: int = 0
    world: int = 1
    seal: str = ""

    @classmethod
    def of_member(cls, plan: GenerationPlan, worker: str) -> PartShare:
        """Return that of one member of a plan."""
        rank, seal = plan.rank(worker) or 0, seal_of(plan.secret).hex()[:8]
        return cls(term=plan.term, generation=plan.generation, rank=rank, world=len(plan.members), seal=seal)

    def checkpoint_name(self, step: int) -> CheckpointName:
        """Return what all members of the plan call the checkpoint of a step."""
        return CheckpointName(term=self.term, generation=self.generation, step=step, nonce=self.seal)


class PartSink(Protocol):
    """Where a worker's parts go: to its agent, or, where there is none, to where they stay."""

    @property
    def free(self) -> bool: ...

    def write(self, part: PartToWrite) -> None: ...

    def close(self) -> None: ...


class CheckpointSaver:
    """Saves one worker's part of every checkpoint, never in the training thread's way but for the copy."""

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
        place: ReplicaPosition = WHOLE_REPLICA,
    ) -> None:
        """Make sure that the directory is there.

        Args:
            every: steps between checkpoints; None: others say when.
            tell: sends a message to the coordinator.
            obey: what else is done with what becomes of a checkpoint.
            samples: those of the job, to be written down and compared; None for neither.
            place: which part of a replica is here.

        Raises:
            BadInputError: the directory is not usable, or a number makes no sense.
        """
        if every is not None and every < 1:
            raise BadInputError(f"checkpoint_every is {every}: it must be at least 1")
        storage.check()
        self.storage = storage
        self._worker = worker
        self._every = every
        self._samples = samples
        self._place = place
        self._sink, self._send = sink, send
        self._forward_order = forward_order
        self._lock = threading.Lock()
        #: what was written here and waits for what becomes of it: the newest
        self._pending: CheckpointName | None = None
        #: the newest checkpoint that counts, or the one that was loaded here since
        self._newest: CheckpointName | None = None
        self._best = BestStates(storage)
        #: the step of the state that was rated last as one of the best, or 0
        self._rated_step = 0
        self._on_idle: Callable[[], None] = lambda: None
        self._later = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdfast-best")

    @property
    def is_idle(self) -> bool:
        """True where nothing that was written here waits for what becomes of it."""
        with self._lock:
            return self._pending is None

    @property
    def is_saving_best(self) -> bool:
        """True while a state that was rated as one of the best is being saved."""
        with self._lock:
            return self._pending is not None and self._pending.step == self._rated_step

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that counts, or of the one that was loaded here since; 0: there is none."""
        with self._lock:
            return self._newest_step

    def is_still_saving(self, step: int) -> bool:
        """Return whether this worker's part of an earlier checkpoint keeps all workers from saving after `step`."""
        return (self.is_timed or self.is_due(step)) and not self._sink.free

    @property
    def is_timed(self) -> bool:
        """Whether others say when a checkpoint is due, rather than the step's number."""
        return self._every is None

    def set_on_idle(self, on_idle: Callable[[], None]) -> None:
        """Call a function, from another thread, whenever `idle` may have become true."""
        self._on_idle = on_idle

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint of this step is wanted: the same on all workers."""
        return self._every is not None and step % self._every == 0

    def save_if_due(
        self,
        state: TrainingState,
        step: int,
        share: PartShare,
        wishes: Collection[Wish] = (),
        experts: Callable[[], ExpertRows] | None = None,
    ) -> bool:
        """The state is that of `step` now: copy it if a checkpoint is due, and return whether one is under way.

        Called by the training thread; the state must not change until it returns.

        Args:
            wishes: those in the step's v. They say for all workers whether a checkpoint that is due is left out,
                because some worker's part of the one before is still being written.
            experts: gives those that this worker saves.
        """
        return is_save_due(wishes, due=self.is_due(step)) and self.save(state, step, share, experts)

    def has_saved(self, step: int, share: PartShare) -> bool:
        """Tell whether nothing more is to be written of a step by this worker."""
        with self._lock:
            return self._newest_step == step or self._pending == share.checkpoint_name(step)

    def save(
        self, state: TrainingState, step: int, share: PartShare, experts: Callable[[], ExpertRows] | None = None
    ) -> bool:
        """As `offer`, due or not."""
        begun = time.monotonic()
        view, rows = state.capture(), experts() if experts is not None else None
        try:
            among = self._place.role_position(share.rank, share.world)
            part = copy_part(view, *among, rows.rows if rows is not None else None, self._place)
        except (RuntimeError, MemoryError) as error:
            logger.error("the checkpoint of step %d is left out, for there is no room for a copy: %s", step, error)
            self.report_unwritten(step, share, f"there is no room for a copy: {error}"[:1000])
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
                stall_s=time.monotonic() - begun,
                begun=begun,
            )
        )
        return True

    def report_unwritten(self, step: int, share: PartShare, why: str) -> None:
        """Nothing of a step is to be saved here: so that nobody waits for this worker's part of it."""
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
        """The state of a step was evaluated: keep its checkpoint, once it counts, while it is one of the best."""
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
        """As `load_checkpoint`, and the experts, too; what is whole and holds a NaN counts as damaged.

        Args:
            experts: those of this worker; `wanted`: the ones of each layer that it is to host.
            first: warn if settings of the checkpoint differ from the script's; not for a worker that has trained, whose
                settings the checkpoint takes back together with its steps.
        """
        settings, frozen = state.optimizers.settings(), state.frozen_parameters()
        step = load_checkpoint(self.storage, name, state, self._samples, self._place)
        if first:
            for warning in (*changed_settings(settings, state.optimizers.settings()), changed_frozen(frozen, state)):
                if warning:
                    logger.warning("%s", warning)
        if experts is not None:
            load_experts(self.storage, name, experts, wanted)
        if bad := state.find_nan():
            raise DamagedCheckpointError(f"{bad} has values that are no numbers")
        return step

    def on_loaded(self, name: str) -> None:
        """The state came from this checkpoint, "" for elsewhere: what was written since is nobody's."""
        with self._lock:
            self._pending, self._newest = None, parse_name(name) if name else None
        self._on_idle()

    def on_order(self, order: AcceptCheckpoint | PruneCheckpoints) -> None:
        """Hear what becomes of a checkpoint."""
        if isinstance(order, AcceptCheckpoint) and not order.files:
            self._run_later(self._on_complete, order)
        elif isinstance(order, PruneCheckpoints):
            for name in order.names:
                self._clear_pending(name)
                self._forget_checkpoint(name)
            self._on_idle()
        self._forward_order(order)

    def close(self) -> None:
        """Wait for what is under way."""
        self._sink.close()
        self._later.shutdown(wait=True)

    def _on_complete(self, order: AcceptCheckpoint) -> None:
        """A checkpoint counts; whoever waits for that may end this process next: what is to be done is done before."""
        try:
            self._best.on_complete(order.step)
        finally:  # Otherwise the training thread would wait for this checkpoint forever.
            self._clear_pending(order.name)
            with self._lock:
                if order.step >= self._newest_step:
                    self._newest = parse_name(order.name)
            self._on_idle()

    def _clear_pending(self, name: str) -> None:
        with self._lock:
            if self._pending is not None and self._pending.folder == name:
                self._pending = None

    def _forget_checkpoint(self, name: str) -> None:
        """A checkpoint does not count any more, although it did: others may have found it damaged."""
        with self._lock:
            if self._newest is not None and self._newest.folder == name:
                self._newest = None

    @property
    def _newest_step(self) -> int:
        return self._newest.step if self._newest is not None else 0

    def _run_later(self, do: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # (the process is at its end)
            self._later.submit(do, *arguments)


def side_files(
    view: StateView, experts: ExpertRows | None, samples: SampleSettings | None
) -> dict[str, Callable[[], Iterable[Chunk]]]:
    """Return the content of the small files of a checkpoint, by name: what its tensors are."""
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
    place: ReplicaPosition = WHOLE_REPLICA,
) -> int:
    """Load a checkpoint into the model, the optimizer and the extra objects, and return its step.

    Nothing is touched before the checkpoint is known to be whole and of this model.

    Args:
        place: which part of a replica is here, whatever was where the checkpoint was written.

    Raises:
        DamagedCheckpointError: it is not whole.
        BadInputError: it is that of another model, optimizer or extra, or of a job with other samples.
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
        manifest, parts = localize_manifest(state, manifest, place)
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
    """Refuse to go on with other samples; a checkpoint need not say what its were."""
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
    """Load those experts that a worker is to host, at any world size; `load_checkpoint` has checked the files.

    Args:
        wanted: the experts of each layer.

    Raises:
        DamagedCheckpointError: what it says of the experts cannot be read.
        BadInputError: it is that of another model.
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
    """Return one of the small files, which is what was written."""
    _, files = checkpoint_dir.read_manifest(storage, checkpoint)
    file = next((file for file in files if file.name == name), None)
    if file is None or file.bytes > _MAX_BESIDE_BYTES:
        raise DamagedCheckpointError(f"{checkpoint} has no {name}, or one that is too large")
    try:
        with open_verified(storage, checkpoint, file) as stream:
            return stream.read(file.bytes)
    except OSError as error:
        raise DamagedCheckpointError(f"{checkpoint}/{name} cannot be read: {error_text(error)}") from None
