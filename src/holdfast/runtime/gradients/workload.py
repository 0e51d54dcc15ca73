"""What a job trains, and the arithmetic of one step: gradients of micro-batches in, optimizer step out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from holdfast.errors import BadInputError
from holdfast.protocol.commit import Commit
from holdfast.protocol.fingerprint import Fingerprint, fingerprint_contribution
from holdfast.runtime.data.loading import MicroBatchLoader
from holdfast.runtime.data.randomness import seed_micro_batch
from holdfast.runtime.dtensor.place import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.gradients.emulation import MicroBatchDelay
from holdfast.runtime.gradients.fingerprinting import Fingerprinting
from holdfast.runtime.gradients.flop_count import FirstRoundCounter
from holdfast.runtime.gradients.logged_values import LoggedValues
from holdfast.runtime.gradients.loss_scale import LossScale, add_scaler
from holdfast.runtime.gradients.running_statistics import RunningStatistics
from holdfast.runtime.gradients.skipped_micro_batches import SkippedMicroBatches
from holdfast.runtime.gradients.updates import Update, Updates
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.moe.holding.job_experts import JobExperts, make_job_experts
from holdfast.runtime.moe.layer.expert_layer import expert_parameters
from holdfast.runtime.notes import Note, Notes, NoteSource
from holdfast.runtime.reduction.reduction import EMPTY_RESULT, compare_nothing, reduce_gradients
from holdfast.runtime.state.refusals import check_extra, check_model
from holdfast.runtime.state.state import TrainingState
from holdfast.step_samples import StepSamples, place_hash

#: where the data's streams stand, in the training state
STREAMS = "holdfast.streams"


@dataclass(kw_only=True, slots=True)
class LocalSums:
    """What this worker has summed up of a step: gradients are in the buckets, the rest is here.

    `hashes`: of the micro-batches whose gradients are in, whatever was to be computed; they stay as long as those do.
    `notes`: what each of them has left beside its gradient.
    """

    step: int = 0
    micro_batches: list[int] = field(default_factory=list[int])
    loss: float = 0.0
    samples: int = 0
    #: of these, in micro-batches that the script has skipped
    skipped: int = 0
    hashes: int = 0
    notes: dict[int, Note] = field(default_factory=dict[int, Note])


class Workload:
    """Model, optimizer and data of a job."""

    def __init__(
        self,
        *,
        state: TrainingState,
        loader: MicroBatchLoader,
        seed: int,
        updates: Updates,
        loss_scale: LossScale,
        experts: JobExperts | None = None,
        noted: Sequence[NoteSource] = (),
        place: ReplicaPosition = WHOLE_REPLICA,
    ) -> None:
        """Take over the model's gradients.

        Args:
            updates: what each step updates of the state.
            place: which part of a replica is here.
            experts: of the model's MoE layers; None for a dense model.
            noted: what leaves a note of each micro-batch beside its gradient; the same on all ranks, in this order.
        """
        self.state = state
        self.loader = loader
        self.samples = StepSamples(
            seed=seed, micro_batches=loader.order.micro_batches, micro_batch=loader.order.micro_batch
        )
        self.seed = seed
        self.updates = updates
        self.loss_scale = loss_scale
        self.experts = experts
        self.place = place
        self.sums = LocalSums()
        #: how long a micro-batch is to take; None: as long as it takes
        self.delay: MicroBatchDelay | None = None
        self.flop = FirstRoundCounter()
        self.logged = LoggedValues()
        self.skipping = SkippedMicroBatches()
        self._notes = Notes((*noted, self.logged, self.skipping), self.micro_batches, place)
        self._statistics = next((source for source in noted if isinstance(source, RunningStatistics)), None)
        self._versions: dict[str, tuple[int, int]] = {}
        self._fingerprinting = Fingerprinting(state)
        #: hash of the micro-batch that was fetched last
        self._loaded_hash = 0

    @property
    def update(self) -> Update:
        """What the step under way updates; before the first one, what that will."""
        return self.updates.update_of_step(max(self.sums.step, 1))

    @property
    def micro_batches(self) -> int:
        """M, per step."""
        return self.loader.order.micro_batches

    def preserve_statistics(self) -> AbstractContextManager[None]:
        """Return what lets a forward pass that is no micro-batch's change no running statistics."""
        return self._statistics.preserve() if self._statistics is not None else nullcontext()

    def start_step(self, step: int, summed: tuple[int, ...]) -> None:
        """Start a step from nothing, or go on from the micro-batches that are summed up already.

        Raises:
            RuntimeError: `summed` is not what is here; the job would count samples twice or lose some.
        """
        self.reshard_parameters()
        if self.experts is not None:
            self.experts.start_step()
        self._notes.on_attempt_start()
        if not summed:
            self.sums = LocalSums(step=step)
            self.update.start_step(fresh=True)
            return
        if self.sums.step != step or sorted(self.sums.micro_batches) != sorted(summed):
            raise RuntimeError(
                f"broken invariant: step {step} is to go on from micro-batches {sorted(summed)}, but the sums here are "
                f"of step {self.sums.step}, micro-batches {sorted(self.sums.micro_batches)}"
            )
        self.update.start_step(fresh=False)

    def reshard_parameters(self) -> None:
        """Parameters may have changed: none are to be used that FSDP2 has gathered before.

        It keeps what a forward pass has gathered until a backward pass, and a script may do one without the other.
        """
        if self.place.has_layout:
            from holdfast.runtime.layouts.sharded import reshard

            for module in (self.state.model, *self.state.extra.values()):
                if isinstance(module, torch.nn.Module):
                    reshard(module)

    def load_micro_batch(self, micro_batch: int) -> Any:
        """Fetch a micro-batch, and seed everything for it."""
        self._notes.on_micro_batch_start(self.sums.step, micro_batch)
        batch = self.loader.load(self.sums.step, micro_batch)
        seed_micro_batch(self.seed, self.sums.step, micro_batch, self.place.shard)
        if self.experts is not None:
            self.experts.state.start_micro_batch(self.sums.step, micro_batch, self.place.shard, self.place.layout.shard)
        self._versions = self.state.buffer_versions()
        self._loaded_hash = self.samples.hash_of(self.sums.step, micro_batch)
        if self.place.local_rank:
            places = self.place.layout.places
            self._loaded_hash = place_hash(self._loaded_hash, self.place.local_rank, places, self.micro_batches)
        if self.delay is not None:
            self.delay.start()
        return batch

    def backward(self, loss: torch.Tensor, micro_batch: int) -> None:
        """Add a micro-batch's gradients; `loss` is its mean, a scalar.

        Raises:
            BadInputError: not a scalar, or the forward pass changed a buffer.
            StepUseError: gradients were made or changed by other hands.
        """
        given = cast(object, loss)  # a script's own, whatever it says it is
        if not isinstance(given, torch.Tensor) or given.numel() != 1:
            raise BadInputError("backward() needs the micro-batch's mean loss: one number, in a tensor")
        self._notes.on_forward_done()
        update = self.update
        update.prepare_backward()
        if loss.requires_grad or update.needs_backward:
            torch.autograd.backward(self.loss_scale.scale_loss(loss))
        update.collect()
        if self.experts is not None:
            self.experts.finish_micro_batch()
        samples = self._finish_micro_batch(micro_batch)
        self.sums.loss += float(loss.detach().double()) * samples

    def skip(self, reason: str, micro_batch: int) -> None:
        """Leave a micro-batch out of the step: no gradient, no loss, and no part in the means over the samples.

        Raises:
            BadInputError: with a layout, or the forward pass changed a buffer.
            StepUseError: in the middle of the forward pass of a model with experts.
        """
        if self.place.layout.places > 1:
            raise BadInputError(
                "step.skip() with a layout: the places of a replica would have to decide alike, and each sees its own "
                "part; leave such samples out in the data set"
            )
        update = self.update
        if self.experts is not None:
            update.check_gradients()
            update.buckets.hide_sums()  # What comes from here is void: it must not be added to the sums.
            self.experts.skip_micro_batch(self.sums.step, micro_batch)
            update.start_step(fresh=False)
        self.skipping.skip(reason)
        self.sums.skipped += self._finish_micro_batch(micro_batch)

    def _finish_micro_batch(self, micro_batch: int) -> int:
        """Count a micro-batch that is over, and return how many samples of it are here.

        Raises:
            BadInputError: its forward pass has changed a buffer.
        """
        self.sums.hashes += self._loaded_hash
        now = self.state.buffer_versions()
        if now != self._versions:
            changed = sorted(
                name for name in now.keys() | self._versions.keys() if now.get(name) != self._versions.get(name)
            )
            # Each rank would see other samples: the replicas would no longer be equal.
            raise BadInputError(
                f"the forward pass changes the buffer {changed[0]!r}, and how is not known (as it is of BatchNorm's, "
                "InstanceNorm's and spectral_norm's): that state would differ from replica to replica; change it in a "
                "function that is given as protect(..., after_apply=...), or use a layer without it"
            )
        samples = self.loader.order.micro_batch // self.place.layout.shard
        self.sums.micro_batches.append(micro_batch)
        self.sums.samples += samples
        if self.delay is not None:
            self.delay.sleep_remaining()
        return samples

    def keep_note(self, micro_batch: int) -> None:
        """The script is done with a micro-batch: keep what it leaves beside its gradient."""
        self.sums.notes[micro_batch] = self._notes.make_note()

    def fingerprint(self, step: int, *, with_state: bool) -> Fingerprint:
        """Return what this worker compares with the others of its role at a step.

        Args:
            with_state: include a slice of the state.
        """
        return self._fingerprinting.make(step, with_state=with_state)

    def describe_settings(self) -> tuple[str, ...]:
        """Return the settings in words, for the report about a difference."""
        return self._fingerprinting.describe()

    def reduce(
        self,
        comm: Communicator,
        all_workers: Communicator | None = None,
        fingerprint: Fingerprint | None = None,
    ) -> Commit:
        """Sum the gradients of all ranks, divided by the number of micro-batches and by the loss scale, and clip them.

        Where any rank has noted something beside its gradients, all get everybody's notes.

        Args:
            comm: of those who hold the same part of the model.
            everybody: the world, where those are not all.
            fingerprint: to be compared; None for nothing.

        Returns:
            v, but for its flags: the same on every rank in every bit, with what was logged.

        Raises:
            HaltedError, PeerLostError: abandoned or failed. The local gradients are intact.
            StepUseError: gradients were made or changed by other hands, or are of a parameter that was not trained.
        """
        update, sums = self.update, self.sums
        update.check_before_reduction()
        update.buckets.set_has_notes(self._notes.has_notes(sums.notes))
        parts = self.micro_batches * self.place.layout.shard  # (each a mean over its samples)
        scale = 1.0 / (parts * self.loss_scale.factor)
        place = self.place
        compared = (
            partial(fingerprint_contribution, fingerprint, place.local_rank, place.layout.places)
            if fingerprint is not None
            else compare_nothing
        )
        gradients = update.reducible_gradients(self.experts)
        v = reduce_gradients(gradients, comm, scale, update.max_norm, self._local_result(), all_workers, compared)
        if not update.buckets.any_rank_has_notes():
            self._notes.merge_none()
        elif not self._notes.gather(all_workers or comm, sums.notes):
            # All ranks see that: a step whose notes are not those of its micro-batches is refused as one whose
            # gradients are not.
            v = replace(v, sample_hashes=-1)
        if self.loss_scale.has_overflowed(v):
            v = replace(v, overflow=True)
        metrics, skips = self.logged.metrics, self.skipping.skips
        # All ranks have made the same of the same notes.
        return replace(v, metrics=metrics, skips=skips) if metrics or skips else v

    def _local_result(self) -> Commit:
        """Return what this worker adds to v, but for its gradients: what several places have alike counts once."""
        sums, place = self.sums, self.place
        own = replace(EMPTY_RESULT, **{"place_hashes" if place.local_rank else "sample_hashes": sums.hashes})
        own = replace(own, skipped_samples=sums.skipped)
        return own if place.tensor else replace(own, loss_sum=sums.loss, samples=sums.samples)

    def apply(self, commit: Commit) -> None:
        """Change the state by the reduced gradients: the same on every rank, in every bit.

        A step with gradients that are not finite changes nothing but schedules and loss scale; all ranks see the same
        count. The reduced gradients stay in the parameters until the next step begins.
        """
        if self.experts is not None:
            self.experts.on_step_passed()
        update = self.update
        if not commit.skipped:
            for part in update.reducible_gradients(self.experts):
                part.use_reduced()
            update.step()
            self.reshard_parameters()
        self._notes.apply()
        if commit.nonfinite or not commit.skipped:  # A step that the script skips as a whole says nothing of the scale.
            self.loss_scale.update(skipped=commit.nonfinite > 0)
        update.advance_schedules()
        self.updates.record_schedules()
        self.state.settings.on_applied()

    def finish_shadow_step(self, alone: Communicator) -> None:
        """End a shadow step: reduce and step as in a real one, for what that makes; the state is void afterwards.

        Gradients that are not finite, as a loss scale's first ones, count as zero: the next shadow step is to be one
        like others.

        Raises:
            StepUseError: gradients were made or changed by other hands, or are of a parameter that was not trained.
        """
        update = self.update
        update.check_before_reduction()
        scale = 1.0 / (len(self.sums.micro_batches) * self.place.layout.shard * self.loss_scale.factor)
        v = reduce_gradients(update.reducible_gradients(self.experts), alone, scale, update.max_norm)
        for part in update.reducible_gradients(self.experts):
            part.use_reduced()
        if v.nonfinite:
            for parameter in self.state.optimizers.parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
        update.step()


@dataclass(frozen=True, slots=True)
class ScriptObjects:
    """What a script gives to `Job.protect`, beside its data; `follows`: it has an `after_apply`."""

    model: torch.nn.Module
    optimizer: Optimizer | Mapping[str, Optimizer]
    updates: Sequence[str] | None
    max_grad_norm: float | Mapping[str, float] | None
    scaler: GradScaler | None
    extra: Mapping[str, Any] | None
    has_after_apply: bool


def make_workload(
    given: ScriptObjects, loader: MicroBatchLoader, device: torch.device, place: ReplicaPosition = WHOLE_REPLICA
) -> Workload:
    """Take a script's objects over.

    Args:
        device: where the model belongs.
        place: which part of a replica is here.

    Raises:
        BadInputError: something does not fit.
    """
    model, seed = given.model, loader.order.seed
    check_model(model, device, spread=place.has_layout)
    experts = expert_parameters(model)
    loss_scale = LossScale(given.scaler, model.parameters(), device, micro_batches=loader.order.micro_batches)
    statistics, streams = RunningStatistics(model), loader.streams
    extra = add_scaler(given.extra, given.scaler) | ({STREAMS: streams} if streams is not None else {})
    state = TrainingState(model, given.optimizer, extra, apart=experts, buffers=statistics.state)
    check_extra(state.extra, state.optimizers, follows=given.has_after_apply)
    _check_no_experts(state.extra)
    return Workload(
        state=state,
        loader=loader,
        seed=seed,
        updates=Updates(state, given.updates, given.max_grad_norm, place),
        loss_scale=loss_scale,
        experts=make_job_experts(model, state.optimizers.find_owner(experts), seed=seed),
        noted=[statistics] if streams is None else [statistics, streams],
        place=place,
    )


def _check_no_experts(extra: Mapping[str, object]) -> None:
    """Refuse experts outside of the model: they do not move with it.

    Raises:
        BadInputError: a module in `extra` has experts.
    """
    for name, thing in extra.items():
        if isinstance(thing, torch.nn.Module) and expert_parameters(thing):
            raise BadInputError(
                f"extra[{name!r}] has experts (holdfast.MoE): those of the model move between nodes, and these would "
                "not; leave the experts out, such as with an AveragedModel of each other module"
            )
