"""The experts of one worker during a job: their weights, their migrations, and their part of each step.

`coordination.experts.holding` decides which experts count as held, and when they may be dropped. This module manages
their memory.

Axes: L layers, E experts, N ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.coordination.experts.blobs import decode_experts
from holdfast.coordination.experts.worker_experts import Rearrangement
from holdfast.errors import BadInputError, StepUseError
from holdfast.planning import LoadAverage
from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.protocol.plan import LOADS_WINDOW, ExpertPlan, ExpertShape
from holdfast.runtime.groups.communicator import Communicator, LocalCommunicator
from holdfast.runtime.moe.expert_shards.binding import bind_layers
from holdfast.runtime.moe.expert_shards.choices import RoutingChoices
from holdfast.runtime.moe.expert_shards.gradients import ExpertGradients, NextPlacement
from holdfast.runtime.moe.expert_shards.migrate import plan_moves, stage_migration
from holdfast.runtime.moe.expert_shards.saving import assign_savers, named_rows
from holdfast.runtime.moe.expert_shards.shards import ExpertShards, LayerSpec
from holdfast.runtime.moe.expert_shards.travel import BackgroundMigration
from holdfast.runtime.moe.expert_shards.verify import verify_replicas
from holdfast.runtime.moe.experts.expert_clock import ExpertClock
from holdfast.runtime.moe.hosts import Placement, experts_of_rank, place_everywhere, placement_from_counts
from holdfast.runtime.moe.layer.expert_layer import ExpertLayer, moe_layers, serve_round
from holdfast.runtime.moe.layer.rounds import StepState
from holdfast.runtime.state.memory import host_bytes

#: A step's loads count half after this share of the window. Their mean age is then that of a plain sum over the window.
HALF_LIFE_OF_WINDOW = 0.35
#: Reports of the loads in a window.
REPORTS_PER_WINDOW = 20
#: elements of each weight of each expert that workers compare
_COMPARED_ELEMENTS = 16


class JobExperts:
    """All experts on this worker, and their work in a step."""

    def __init__(self, layers: Sequence[ExpertLayer], optimizer: Optimizer | None, *, seed: int = 0) -> None:
        """Start with all experts, as the script made them, and work alone until `enter_generation`.

        Args:
            optimizer: the one that steps the experts, or None.
            seed: of the job.

        Raises:
            BadInputError: the layers differ in their number of experts.
        """
        numbers = sorted({layer.experts.experts for layer in layers})
        if len(numbers) > 1:
            raise BadInputError(f"the model's MoE layers have {numbers} experts: give all layers the same number")
        self.layers = list(layers)
        self.experts = numbers[0]
        self.shards = ExpertShards(layers, optimizer)
        self.gradients: ExpertGradients
        self.choices: RoutingChoices
        self.state: StepState
        self._seed = seed
        self._comm: Communicator
        self._placement: Placement
        #: the migration during the step in progress, or None
        self.migration: BackgroundMigration | None = None
        #: the placement after that step
        self._next_placement: NextPlacement | None = None
        #: whether the next step needs new gradient buffers, because experts have changed their rows
        self._rebind = False
        self._window = LOADS_WINDOW
        self._clock = ExpertClock()
        for layer in layers:
            layer.clock = self._clock
        self._loads = LoadAverage.empty(len(layers), self.experts)
        self._bind(LocalCommunicator(), place_everywhere([self.experts] * len(layers), 1))

    def shape(self, slots: int) -> ExpertShape:
        """Return the number of layers, experts and slots for the coordinator.

        Args:
            slots: of this node, per layer.
        """
        return ExpertShape(layers=len(self.layers), experts=self.experts, slots=slots)

    def fingerprint(self) -> str:
        """Return a hash of the first elements of each expert's weights, as hexadecimal digits.

        Fresh experts are not sent to other workers. If workers made different ones, the copies of an expert would
        differ from the first step.
        """
        digest = hashlib.blake2b(digest_size=8)
        for layer in self.layers:
            for weight in layer.experts.weights().values():
                digest.update(host_bytes(weight.flatten(1)[:, :_COMPARED_ELEMENTS]))
        return digest.hexdigest()

    @property
    def void(self) -> Exception | None:
        """The reason why the step in progress is void, or None."""
        return self.state.void

    # ---- entering a generation ----

    def enter_generation(
        self,
        comm: Communicator,
        plan: ExpertPlan,
        change: Rearrangement,
        *,
        moving: Communicator | None = None,
    ) -> int:
        """Enter a generation's group and placement, and keep all experts that still count.

        Drops the others, receives the missing ones, and binds the layers. If experts move during the step, only starts
        that: the present placement serves until `on_step_passed`, and nothing is received here.

        Args:
            plan: the experts of each rank now and in the new placement.
            change: which experts to keep, and whether to take part in a migration.
            moving: the same group, wrapped for the migration; None to use `comm`.

        Returns:
            The bytes of the received experts.

        Raises:
            CorruptExpertError: an expert arrived with a wrong checksum.
            HaltedError, PeerLostError: abandoned; all experts are still here.
        """
        keep = _distinct_experts(change.keep)
        if self.shards.hosted != keep:
            # Experts of a migration that was broken off may count.
            self._keep_only(keep, self.migration.arrived if self.migration is not None else None)
        self.migration = self._next_placement = None
        self._window = plan.window
        wanted = self._decode_counts(plan.placement)
        if change.during_step:
            self._prepare_migration(
                comm, placement_from_counts(self._decode_counts(change.serving)), placement_from_counts(wanted)
            )
            return 0
        received = self._receive_missing(moving or comm, self._decode_counts(plan.held), wanted) if change.fetch else 0
        self._bind(comm, placement_from_counts(wanted))
        return received

    def _prepare_migration(self, comm: Communicator, serving: Placement, wanted: Placement) -> None:
        """Keep the present placement for this step, and prepare a background migration to `wanted`. Bind the layers to
        `comm` and `serving`.

        Nothing is sent here: the session transfers the experts that `migration` lists, and `on_step_passed` switches to
        `wanted`.
        """
        self.migration = BackgroundMigration(self.shards, serving, wanted, comm.rank)
        mine = experts_of_rank(wanted, comm.rank)
        rows = tuple(
            self.shards.assign_rows(layer, names, number)
            for layer, (names, number) in enumerate(zip(mine, _row_counts(mine), strict=True))
        )
        self._next_placement = NextPlacement(placement=wanted, rows=rows)
        self._bind(comm, serving)

    def _receive_missing(self, comm: Communicator, held: IntArray, wanted: IntArray) -> int:
        """Receive the experts that this rank lacks, and keep the present ones too; return the received bytes.

        Args:
            held, wanted: replicas now and in the new placement, `(L, E, N)`.

        Raises:
            CorruptExpertError: a checksum is wrong.
            HaltedError, PeerLostError: abandoned; nothing is changed.
        """
        before, after = placement_from_counts(held), placement_from_counts(wanted)
        moves = plan_moves(before, after, [self.experts] * len(self.layers))
        staged = stage_migration(comm, self.shards, held=before, wanted=after, transfers=moves)
        both = _distinct_experts(held[:, :, comm.rank] + wanted[:, :, comm.rank])
        dataclasses.replace(staged, wanted=both, rows=_row_counts(both)).apply()
        return staged.received_bytes

    def _bind(self, comm: Communicator, placement: Placement) -> None:
        """Bind the layers to a group and a placement, with new buffers for gradients and choices."""
        self._bind_layers(comm, placement)
        self.gradients = ExpertGradients(self.layers, placement, comm, self._next_placement)
        self.choices = RoutingChoices(self.layers, self.state)

    def _bind_layers(self, comm: Communicator, placement: Placement) -> None:
        """Bind the layers to a group and a placement, with a new state that is not void."""
        self._comm = comm
        self._placement = placement
        self.state = bind_layers(self.layers, comm, placement)
        self.state.seed = self._seed

    def _decode_counts(self, blobs: Sequence[bytes]) -> IntArray:
        """Return replicas per layer, expert and rank, `(L, E, N)`, from one encoded placement per rank."""
        return np.stack([decode_experts(blob, self.shape(1)) for blob in blobs], axis=2)

    def _keep_only(
        self,
        names: Sequence[Sequence[int]],
        arrived: Sequence[Mapping[tuple[int, str], torch.Tensor]] | None = None,
    ) -> None:
        """Keep exactly these experts of each layer, and release the memory of all others.

        Args:
            arrived: per layer, received rows of new experts, by (expert, name of the tensor).
        """
        for layer, (experts, rows) in enumerate(zip(names, _row_counts(names), strict=True)):
            self.shards.rearrange(layer, experts, rows=rows, arrived=arrived[layer] if arrived else None)

    # ---- a step ----

    def start_step(self) -> None:
        """Start a step with zero gradients and without counts.

        If a migration has ended, release the memory that it needed, and make new gradient buffers.
        """
        hosted = self.shards.hosted
        if any(layer.experts.rows > rows for layer, rows in zip(self.layers, _row_counts(hosted), strict=True)):
            self._keep_only(hosted)
            self._rebind = True
        if self._rebind:
            self.gradients = ExpertGradients(self.layers, self._placement, self._comm)
            self.choices = RoutingChoices(self.layers, self.state)
            self._rebind = False
        self.gradients.zero()
        self.state.start_attempt()

    def serve_micro_batch(self, step: int, micro_batch: int) -> None:
        """Compute this rank's experts for the other ranks' micro-batches of one round, forward and backward."""
        self.state.start_micro_batch(step, micro_batch)
        serve_round(self.layers)
        self.finish_micro_batch()

    def start_evaluation_shard(self, step: int, shard: int) -> None:
        """Prepare for a shard of an evaluation, which has only a forward pass and is not part of the step."""
        self.state.start_micro_batch(step, shard)

    def has_evaluated_shard(self) -> bool:
        """Return whether a shard's forward pass used each layer once; always True if the step is void."""
        return self.void is not None or 2 * self.state.exchanges == self.state.expected_exchanges

    def serve_evaluation_shard(self, step: int, shard: int) -> None:
        """Compute forward for the other ranks' shards in one round of an evaluation, if this rank has no shard in it.

        Args:
            shard: index of the round's first shard.
        """
        self.start_evaluation_shard(step, shard)
        for layer in self.layers:
            layer.serve()

    def finish_micro_batch(self) -> None:
        """Collect the gradients of a micro-batch after its backward.

        Raises:
            BadInputError: it did not use all layers, in both directions.
        """
        self.gradients.collect()
        self.state.finish_micro_batch()

    def skip_micro_batch(self, step: int, micro_batch: int) -> None:
        """Leave the script's micro-batch out, but serve the other ranks' micro-batches of the round.

        Before the forward pass, it is served as by a rank without a micro-batch. After it, a backward pass of zeros
        runs. Does nothing if the step is void, or this worker is alone.

        Raises:
            StepUseError: the forward pass has used only some of the layers.
        """
        state = self.state
        state.micro_batch_choices.clear()
        if state.void is not None or not state.expected_exchanges:
            return
        if not state.exchanges and not state.next_layer:
            self.serve_micro_batch(step, micro_batch)
            return
        if 2 * state.exchanges != state.expected_exchanges or state.output is None:
            raise StepUseError(
                f"step {step}: skip() in the middle of the forward pass: call it before the model is called, or after"
            )
        edge, like = state.output
        state.skipping = True
        try:
            torch.autograd.backward(edge, torch.zeros_like(like))
        finally:
            state.skipping = False
        self.finish_micro_batch()

    def on_step_passed(self) -> None:
        """Add the loads of the step, and drop the experts that this rank no longer hosts: all members now hold theirs.

        Called when a commit operation of this generation has passed. The number of rows stays the same, because the
        reduced gradients use the same rows. After a background migration, the received experts get the rows that were
        planned for them.
        """
        self._add_step_loads()
        if self._next_placement is not None:
            self._adopt_migrated(self._next_placement)
            return
        placed = experts_of_rank(self._placement, self._comm.rank)
        if self.shards.hosted != placed:
            for layer, names in enumerate(placed):
                self.shards.rearrange(layer, names)

    def _adopt_migrated(self, next_placement: NextPlacement) -> None:
        """Complete a background migration: keep only this rank's experts of `next_placement`, the received ones in
        their planned rows, and bind the layers to that placement.

        The next step makes new buffers for gradients and choices.
        """
        assert self.migration is not None
        placed = experts_of_rank(next_placement.placement, self._comm.rank)
        self._keep_only(placed, self.migration.arrived)
        on_void = self.state.on_void
        self._bind_layers(self._comm, next_placement.placement)
        self.state.on_void = on_void
        self.migration = None
        self._next_placement = None
        self._rebind = True

    def _add_step_loads(self) -> None:
        """Add the loads of the step that has passed to the moving average, and forget them.

        Loads of abandoned attempts are never added.
        """
        none = np.zeros(self.experts, dtype=np.int64)
        tokens = np.stack([self.state.loads.get(layer, none) for layer in range(len(self.layers))])
        self._loads = self._loads.add(tokens, steps=1, half_life=HALF_LIFE_OF_WINDOW * self._window)
        self.state.loads.clear()

    @property
    def loads(self) -> FloatArray:
        """Tokens per step, layer and expert `(L, E)`, of all ranks; recent steps count most."""
        return self._loads.per_step()

    @property
    def report_every(self) -> int:
        """Number of steps between two reports of the loads."""
        return max(self._window // REPORTS_PER_WINDOW, 1)

    @property
    def token_s(self) -> float:
        """Seconds per token of an expert on this rank, forward and backward; 0 before the first measurement."""
        return self._clock.token_s

    @property
    def expert_bytes(self) -> int:
        """Bytes of parameters and optimizer state of the largest expert."""
        return max(spec.nbytes for spec in self.describe_layers())

    def verify(self, comm: Communicator) -> None:
        """Compare all copies of each expert, on all ranks.

        Raises:
            ReplicasDifferError: on all ranks.
            HaltedError, PeerLostError: abandoned or failed.
        """
        verify_replicas(comm, self.shards)

    # ---- checkpoints ----

    def rows_to_save(self) -> dict[str, torch.Tensor]:
        """Return the live rows, by name, of the experts that this rank saves: one host saves each expert."""
        pairs = assign_savers(self._placement, (self.experts,) * len(self.layers))
        return named_rows(self.shards, pairs[self._comm.rank])

    def part_to_save(self) -> tuple[tuple[tuple[int, int], ...], list[torch.Tensor]]:
        """Return the (layer, expert) pairs that this rank saves, and their live rows."""
        pairs = assign_savers(self._placement, (self.experts,) * len(self.layers))[self._comm.rank]
        return pairs, self.rows_of_pairs(pairs)

    def rows_of_pairs(self, pairs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Return the live rows of (layer, expert) pairs on this rank, one after the other."""
        specs = self.describe_layers()
        return [self.shards.row(layer, expert, row) for layer, expert in pairs for row in specs[layer].rows]

    def describe_layers(self) -> tuple[LayerSpec, ...]:
        """Return the specification of each layer's tensors and optimizer values.

        Raises:
            BadInputError: the optimizer has state that is neither one row per expert nor one value.
        """
        return tuple(self.shards.describe(layer) for layer in range(len(self.layers)))

    def planned_experts(self, plan: ExpertPlan, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the experts of each layer that a plan gives this rank, ascending."""
        return self.decode_experts(plan.placement[rank])

    def decode_experts(self, blob: bytes) -> tuple[tuple[int, ...], ...]:
        """Return the distinct experts of each layer in an encoded placement, ascending."""
        return _distinct_experts(decode_experts(blob, self.shape(1)))

    def adopt(
        self,
        names: Sequence[Sequence[int]],
        specs: Sequence[LayerSpec],
        arrived: Sequence[Mapping[tuple[int, str], torch.Tensor]],
    ) -> None:
        """Replace all experts by the experts of a checkpoint, with their optimizer state.

        Args:
            names: the experts of this rank, per layer.
            specs: per layer, the tensors and the optimizer values of the checkpoint.
            arrived: per layer, the rows that were read, by (expert, name of the tensor).
        """
        for layer, spec in enumerate(specs):
            self.shards.set_optimizer_state(layer, spec)
        self._keep_only(names, arrived)


def make_job_experts(model: nn.Module, optimizer: Optimizer | None, *, seed: int = 0) -> JobExperts | None:
    """Return the experts of a model, or None for a dense one.

    Args:
        optimizer: the one that steps them, or None.
        seed: of the job.

    Raises:
        BadInputError: its layers differ in their number of experts.
    """
    layers = moe_layers(model)
    return JobExperts(layers, optimizer, seed=seed) if layers else None


def _distinct_experts(counts: IntArray) -> tuple[tuple[int, ...], ...]:
    """Return the distinct experts per layer, ascending."""
    return tuple(tuple(int(expert) for expert in np.flatnonzero(row)) for row in counts)


def _row_counts(names: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the number of rows for the experts of each layer; at least 1, because a stack needs a row to multiply."""
    return tuple(max(1, len(experts)) for experts in names)
