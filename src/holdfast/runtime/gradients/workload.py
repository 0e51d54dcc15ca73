"""A job's model, optimizers and data, and the arithmetic of one step."""

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
from holdfast.runtime.dtensor.replica_position import WHOLE_REPLICA, ReplicaPosition
from holdfast.runtime.gradients.emulation import MicroBatchDelay
from holdfast.runtime.gradients.fingerprinting import Fingerprinting
from holdfast.runtime.gradients.flop_count import FirstRoundCounter
from holdfast.runtime.gradients.logged_values import LoggedValues
from holdfast.runtime.gradients.loss_scale import LossScale, add_scaler
from holdfast.runtime.gradients.running_statistics import RunningStatistics
from holdfast.runtime.gradients.skipped_micro_batches import SkippedMicroBatches
from holdfast.runtime.gradients.updates import Update, Updates
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.micro_batch_notes import Note, Notes, NoteSource
from holdfast.runtime.moe.expert_shards.job_experts import JobExperts, make_job_experts
from holdfast.runtime.moe.layer.expert_layer import expert_parameters
from holdfast.runtime.reduction.reduction import EMPTY_RESULT, compare_nothing, reduce_gradients
from holdfast.runtime.state.refusals import check_extra, check_model
from holdfast.runtime.state.state import TrainingState
from holdfast.step_samples import StepSamples, place_hash

#: name of the data streams' positions in the training state
STREAMS = "holdfast.streams"


@dataclass(kw_only=True, slots=True)
class LocalSums:
    """This worker's sums of a step, except for gradients, which are in the buckets."""

    step: int = 0
    micro_batches: list[int] = field(default_factory=list[int])
    #: sum of the losses of all samples
    loss: float = 0.0
    samples: int = 0
    #: samples in micro-batches that the script has skipped
    skipped: int = 0
    #: sum of the hashes of the micro-batches in the gradients; kept as long as the gradients
    hashes: int = 0
    #: notes of each micro-batch
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
        position: ReplicaPosition = WHOLE_REPLICA,
    ) -> None:
        """Manage the model's gradients.

        Args:
            updates: selects the optimizer of each step.
            position: the part of a replica on this worker.
            experts: of the model's MoE layers; None for a dense model.
            noted: sources of a micro-batch's notes; the same on all ranks, in this order.
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
        self.position = position
        self.sums = LocalSums()
        #: emulates the time of a micro-batch, or None
        self.delay: MicroBatchDelay | None = None
        self.flop = FirstRoundCounter()
        self.logged = LoggedValues()
        self.skipping = SkippedMicroBatches()
        self._notes = Notes((*noted, self.logged, self.skipping), self.micro_batches, position)
        self._statistics = next((source for source in noted if isinstance(source, RunningStatistics)), None)
        self._versions: dict[str, tuple[int, int]] = {}
        self._fingerprinting = Fingerprinting(state)
        #: hash of the last loaded micro-batch
        self._loaded_hash = 0

    @property
    def update(self) -> Update:
        """The update of the step in progress; before the first one, of the first one."""
        return self.updates.update_of_step(max(self.sums.step, 1))

    @property
    def micro_batches(self) -> int:
        """M, per step."""
        return self.loader.order.micro_batches

    def preserve_statistics(self) -> AbstractContextManager[None]:
        """Return a context in which forward passes do not change running statistics."""
        return self._statistics.preserve() if self._statistics is not None else nullcontext()

    def start_step(self, step: int, summed: tuple[int, ...]) -> None:
        """Start an attempt at a step: discard unfinished notes, and start without sums, or continue from micro-batches
        that are summed here already.

        Args:
            summed: the numbers of these micro-batches; empty: start without sums.

        Raises:
            RuntimeError: `summed` differs from the local sums; the job would count samples twice or lose some.
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
                f"broken invariant: step {step} must continue from micro-batches {sorted(summed)}, but the sums here "
                f"are of step {self.sums.step}, micro-batches {sorted(self.sums.micro_batches)}"
            )
        self.update.start_step(fresh=False)

    def reshard_parameters(self) -> None:
        """Drop the full parameters that FSDP2 has gathered, in the model and in extra modules, because parameters may
        have changed. Does nothing without a layout.

        FSDP2 keeps the gathered parameters of a forward pass until its backward pass, and a script may do one without
        the other.
        """
        if self.position.has_layout:
            from holdfast.runtime.layouts.sharded import reshard

            for module in (self.state.model, *self.state.extra.values()):
                if isinstance(module, torch.nn.Module):
                    reshard(module)

    def load_micro_batch(self, micro_batch: int) -> Any:
        """Return the data of a micro-batch of this step on the device, and prepare its forward pass: seed all random
        numbers, start its notes and its emulated time, and record its hash and the buffers' versions.
        """
        self._notes.on_micro_batch_start(self.sums.step, micro_batch)
        batch = self.loader.load(self.sums.step, micro_batch)
        seed_micro_batch(self.seed, self.sums.step, micro_batch, self.position.shard)
        if self.experts is not None:
            self.experts.state.start_micro_batch(
                self.sums.step, micro_batch, self.position.shard, self.position.layout.shard
            )
        self._versions = self.state.buffer_versions()
        self._loaded_hash = self.samples.hash_of(self.sums.step, micro_batch)
        if self.position.local_rank:
            places = self.position.layout.places
            self._loaded_hash = place_hash(self._loaded_hash, self.position.local_rank, places, self.micro_batches)
        if self.delay is not None:
            self.delay.start()
        return batch

    def backward(self, loss: torch.Tensor, micro_batch: int) -> None:
        """Run backward on a micro-batch's mean loss, scaled, and add its gradients, loss, samples and hash to the
        step's sums. If no parameter requires a gradient, only the loss counts.

        Raises:
            BadInputError: it is not a scalar, or the forward pass changed a buffer.
            StepUseError: the script made or changed gradients itself.
        """
        given = cast(object, loss)  # The script may pass any object.
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
        """Finish a micro-batch without a gradient or a loss: its samples are counted as skipped, and `reason` is kept
        for its note and for repeated attempts. With experts, this rank still serves the other ranks' tokens.

        Raises:
            BadInputError: with a layout, or the forward pass changed a buffer.
            StepUseError: in the middle of the forward pass of a model with experts.
        """
        if self.position.layout.places > 1:
            raise BadInputError(
                "step.skip() with a layout: all local ranks of a replica would have to decide alike, and each sees "
                "only its part; leave such samples out in the data set"
            )
        update = self.update
        if self.experts is not None:
            update.check_gradients()
            update.buckets.hide_sums()  # Gradients of the skipped micro-batch must not be added to the sums.
            self.experts.skip_micro_batch(self.sums.step, micro_batch)
            update.start_step(fresh=False)
        self.skipping.skip(reason)
        self.sums.skipped += self._finish_micro_batch(micro_batch)

    def _finish_micro_batch(self, micro_batch: int) -> int:
        """Add a finished micro-batch and its hash to the step's sums, wait for the rest of its emulated time, and
        return the number of its samples on this worker.

        Raises:
            BadInputError: its forward pass has changed a buffer.
        """
        self.sums.hashes += self._loaded_hash
        now = self.state.buffer_versions()
        if now != self._versions:
            changed = sorted(
                name for name in now.keys() | self._versions.keys() if now.get(name) != self._versions.get(name)
            )
            # Each rank sees other samples, so the replicas would differ.
            raise BadInputError(
                f"the forward pass changes the buffer {changed[0]!r}, in an unknown way (known are those of BatchNorm, "
                "InstanceNorm and spectral_norm): that state would differ from replica to replica; change it in a "
                "function that is given as protect(..., after_apply=...), or use a layer without it"
            )
        samples = self.loader.order.micro_batch // self.position.layout.shard
        self.sums.micro_batches.append(micro_batch)
        self.sums.samples += samples
        if self.delay is not None:
            self.delay.sleep_remaining()
        return samples

    def keep_note(self, micro_batch: int) -> None:
        """Keep the note of a micro-batch that the script has finished."""
        self.sums.notes[micro_batch] = self._notes.make_note()

    def fingerprint(self, step: int, *, with_state: bool) -> Fingerprint:
        """Return the fingerprint that this worker compares with the others of its role at a step.

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
        If any rank has notes, exchange and merge all notes.

        Args:
            comm: the group of workers with the same part of the model.
            all_workers: the group of all workers, if it differs from `comm`.
            fingerprint: to be compared; None for nothing.

        Returns:
            The step result without flags, with logged values and skipped micro-batches: the same on every rank in every
            bit. `overflow` is set if the loss scale explains gradients that are not finite. If notes and micro-batches
            do not match, `sample_hashes` is -1, so that the step is refused.

        Raises:
            HaltedError, PeerLostError: abandoned or failed. The local gradients are intact.
            StepUseError: the script made or changed gradients itself, or a gradient's parameter was not trained.
            BadInputError: the notes of a step contradict each other.
        """
        update, sums = self.update, self.sums
        update.check_before_reduction()
        update.buckets.set_has_notes(self._notes.has_notes(sums.notes))
        parts = self.micro_batches * self.position.layout.shard  # The gradient of each part is a mean over its samples.
        scale = 1.0 / (parts * self.loss_scale.factor)
        place = self.position
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
            # All ranks see that notes and micro-batches do not match, and refuse the step by its hashes.
            v = replace(v, sample_hashes=-1)
        if self.loss_scale.has_overflowed(v):
            v = replace(v, overflow=True)
        metrics, skips = self.logged.metrics, self.skipping.skips
        # All ranks have computed the same values from the same notes.
        return replace(v, metrics=metrics, skips=skips) if metrics or skips else v

    def _local_result(self) -> Commit:
        """Return this worker's losses, samples, skipped samples and hashes of the step as a step result. Of local ranks
        with the same samples, only the first one has losses and samples, and the others put their hashes into
        `place_hashes`.
        """
        sums, place = self.sums, self.position
        own = replace(EMPTY_RESULT, **{"place_hashes" if place.local_rank else "sample_hashes": sums.hashes})
        own = replace(own, skipped_samples=sums.skipped)
        return own if place.tensor else replace(own, loss_sum=sums.loss, samples=sums.samples)

    def apply(self, commit: Commit) -> None:
        """Apply a step that has passed: update the parameters by the reduced gradients, then the merged notes, the loss
        scale and the schedules. The result is the same on every rank, in every bit.

        If gradients were not finite or all micro-batches were skipped, only the parameters stay unchanged, and in the
        second case also the loss scale. The reduced gradients stay in the parameters until the next step starts.
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
        if commit.nonfinite or not commit.skipped:  # A step without trained micro-batches does not update the scale.
            self.loss_scale.update(skipped=commit.nonfinite > 0)
        update.advance_schedules()
        self.updates.record_schedules()
        self.state.settings.on_applied()

    def finish_shadow_step(self, alone: Communicator) -> None:
        """Reduce this worker's gradients alone and step the optimizer as in a real step, as warm-up; the state is void
        afterwards.

        Gradients that are not finite, such as the first ones of a loss scale, are replaced by zero, so that the next
        shadow step is like any other.

        Args:
            alone: a communicator of this worker only.

        Raises:
            StepUseError: the script made or changed gradients itself, or a gradient's parameter was not trained.
        """
        update = self.update
        update.check_before_reduction()
        scale = 1.0 / (len(self.sums.micro_batches) * self.position.layout.shard * self.loss_scale.factor)
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
    """The objects that a script passes to `Job.protect`, except for its data."""

    model: torch.nn.Module
    optimizer: Optimizer | Mapping[str, Optimizer]
    updates: Sequence[str] | None
    max_grad_norm: float | Mapping[str, float] | None
    scaler: GradScaler | None
    extra: Mapping[str, Any] | None
    #: whether the script has an `after_apply`
    has_after_apply: bool


def make_workload(
    given: ScriptObjects, loader: MicroBatchLoader, device: torch.device, position: ReplicaPosition = WHOLE_REPLICA
) -> Workload:
    """Check a script's objects, and make the workload of them: the training state, the loss scale, the order of
    updates, the running statistics, and the experts if the model has some.

    Args:
        device: of the model.
        position: the part of a replica on this worker.

    Raises:
        BadInputError: something does not fit.
    """
    model, seed = given.model, loader.order.seed
    check_model(model, device, has_layout=position.has_layout)
    experts = expert_parameters(model)
    loss_scale = LossScale(given.scaler, model.parameters(), device, micro_batches=loader.order.micro_batches)
    statistics, streams = RunningStatistics(model), loader.streams
    extra = add_scaler(given.extra, given.scaler) | ({STREAMS: streams} if streams is not None else {})
    state = TrainingState(model, given.optimizer, extra, apart=experts, buffers=statistics.state)
    check_extra(state.extra, state.optimizers, has_after_apply=given.has_after_apply)
    _check_no_experts(state.extra)
    return Workload(
        state=state,
        loader=loader,
        seed=seed,
        updates=Updates(state, given.updates, given.max_grad_norm, position),
        loss_scale=loss_scale,
        experts=make_job_experts(model, state.optimizers.find_owner(experts), seed=seed),
        noted=[statistics] if streams is None else [statistics, streams],
        position=position,
    )


def _check_no_experts(extra: Mapping[str, object]) -> None:
    """Refuse experts outside of the model, because they do not move with it.

    Raises:
        BadInputError: a module in `extra` has experts.
    """
    for name, thing in extra.items():
        if isinstance(thing, torch.nn.Module) and expert_parameters(thing):
            raise BadInputError(
                f"extra[{name!r}] has experts (holdfast.MoE): experts of the model move between nodes, and these "
                "would not; leave the experts out, such as with an AveragedModel of each other module"
            )
