"""The experts of one worker through a job's life: which live here, which will, and their part of each step.

Entering an epoch changes the placement tentatively: what was held stays until the epoch's first commit operation has
passed. That proves that everybody has all it is to host, so that a migration that was broken off loses nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.coordination.experts import decode, encode
from holdfast.errors import BadInputError, JobFailedError
from holdfast.planning import LoadAverage
from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.protocol.plan import LOADS_WINDOW, DecisionKind, ExpertPlan, ExpertShape
from holdfast.runtime.communicator import Communicator, LocalCommunicator
from holdfast.runtime.moe.binding import bind_layers
from holdfast.runtime.moe.expert_clock import ExpertClock
from holdfast.runtime.moe.gradients import ExpertGradients
from holdfast.runtime.moe.layer import MoE, moe_layers, serve_round
from holdfast.runtime.moe.migrate import plan_moves, stage
from holdfast.runtime.moe.placement import Placement, everywhere, from_counts
from holdfast.runtime.moe.rounds import StepState
from holdfast.runtime.moe.saving import rows_of
from holdfast.runtime.moe.shards import ExpertShards, LayerSpec
from holdfast.runtime.moe.verify import verify_replicas

#: A step's loads count half after this share of the window: their mean age is then that in a sum over the window.
HALF_LIFE_OF_WINDOW = 0.35
#: Reports of the loads in a window.
REPORTS_PER_WINDOW = 20


class JobExperts:
    """All experts that live here, and what they do in a step."""

    def __init__(self, layers: Sequence[MoE], optimizer: Optimizer) -> None:
        """Hold all experts, as a script has made them; work alone until `enter`.

        Raises:
            BadInputError: the layers differ in their number of experts.
        """
        numbers = sorted({layer.experts.experts for layer in layers})
        if len(numbers) > 1:
            raise BadInputError(f"the model's MoE layers have {numbers} experts: give all layers the same number")
        self.layers = list(layers)
        self.experts = numbers[0]
        self.shards = ExpertShards(layers, optimizer)
        #: These are the experts that the script made, all of them, never trained nor replaced.
        self.untouched = True
        self.gradients: ExpertGradients
        self.state: StepState
        self._counts = np.ones((len(layers), self.experts), dtype=np.int64)
        self._placed = self._counts
        self._placement: Placement = ()
        self._window = LOADS_WINDOW
        self._clock = ExpertClock()
        for layer in layers:
            layer.clock = self._clock
        self._loads = LoadAverage.empty(len(layers), self.experts)
        self._bind(LocalCommunicator(), everywhere([self.experts] * len(layers), 1))

    def shape(self, slots: int) -> ExpertShape:
        """Return what the coordinator must know.

        Args:
            slots: of this node, per layer.
        """
        return ExpertShape(layers=len(self.layers), experts=self.experts, slots=slots)

    @property
    def blob(self) -> bytes:
        """What is held here with the state of the applied step, as reports say it."""
        return encode(self._counts)

    @property
    def void(self) -> Exception | None:
        """Why the step under way is void, None while it is not."""
        return self.state.void

    # ---- entering an epoch ----

    def enter(
        self,
        comm: Communicator,
        plan: ExpertPlan | None,
        decision: DecisionKind | None,
        *,
        moving: Communicator | None = None,
    ) -> int:
        """Take up an epoch's group and placement; nothing that was held is let go of yet.

        Args:
            plan: None for a world of one that hosts everything.
            decision: what the epoch began with, None after a swap.
            moving: the same group, wrapped for the migration; None: as it is.

        Returns:
            The bytes of the experts that came here.

        Raises:
            JobFailedError: this worker's initial experts are wanted, and are not there any more.
            CorruptExpertError: an expert came damaged.
            HaltedError, PeerLostError: broken off; what was held still is.
        """
        if plan is None:
            self._bind(comm, everywhere([self.experts] * len(self.layers), comm.size))
            return 0
        held, wanted = self._columns(plan.held), self._columns(plan.placement)
        received = 0
        if decision is DecisionKind.START:
            if not self.untouched:
                raise JobFailedError("the initial experts are wanted, but this worker has none any more")
        elif decision is not DecisionKind.ROLLBACK:
            self._keep(held[:, :, comm.rank])
            if plan.moves:
                received = self._bring(moving or comm, held, wanted)
        self._placed = wanted[:, :, comm.rank]
        self._window = plan.window
        self._bind(comm, from_counts(wanted))
        return received

    def _keep(self, held: IntArray) -> None:
        """Let go of what does not count.

        Experts of a state that was replaced by another worker's; or that had just come when a Stop was obeyed, before
        the report could say so.
        """
        if ((held > 0) & (self._counts == 0)).any():
            raise RuntimeError(f"broken invariant: the plan says {held.tolist()}, here is {self._counts.tolist()}")
        if ((held == 0) & (self._counts > 0)).any():
            self._hold(held, {layer: {} for layer in range(len(self.layers))})
        self._counts = held

    def _bring(self, comm: Communicator, held: IntArray, wanted: IntArray) -> int:
        before, after = from_counts(held), from_counts(wanted)
        moves = plan_moves(before, after, [self.experts] * len(self.layers))
        staged = stage(comm, self.shards, held=before, wanted=after, transfers=moves)
        both = np.maximum(held[:, :, comm.rank], wanted[:, :, comm.rank])
        rows = _rows(both)
        self.untouched = False
        dataclasses.replace(staged, wanted=_names(both), rows=rows).apply()
        self._counts = both
        return staged.received_bytes

    def _bind(self, comm: Communicator, placement: Placement) -> None:
        self._placement = placement
        self.state = bind_layers(self.layers, comm, placement)
        self.gradients = ExpertGradients(self.layers, placement, comm)

    def _columns(self, blobs: Sequence[bytes]) -> IntArray:
        """Return replicas per layer, expert and rank, `(L, E, N)`."""
        return np.stack([decode(blob, self.shape(1)) for blob in blobs], axis=2)

    def _hold(self, counts: IntArray, arrived: Mapping[int, Mapping[tuple[int, str], torch.Tensor]]) -> None:
        """Let these experts live here, and no others."""
        self.untouched = False
        for layer, (names, rows) in enumerate(zip(_names(counts), _rows(counts), strict=True)):
            self.shards.rearrange(layer, names, rows=rows, arrived=arrived[layer])
        self._counts = counts

    # ---- a step ----

    def begin(self) -> None:
        """Begin a step: no gradient yet; room that a migration needed is given back once it is over."""
        if any(layer.experts.rows > rows for layer, rows in zip(self.layers, _rows(self._counts), strict=True)):
            self._hold(self._counts, {layer: {} for layer in range(len(self.layers))})
            comm = self.layers[0].binding.channel.comm
            self.gradients = ExpertGradients(self.layers, self._placement, comm)
        self.gradients.zero()
        self.state.loads.clear()

    def serve(self, step: int, micro_batch: int) -> None:
        """Take part in the others' micro-batches of one round, without one of one's own."""
        self.state.begin(step, micro_batch)
        serve_round(self.layers)
        self.computed()

    def computed(self) -> None:
        """A micro-batch has had its backward.

        Raises:
            BadInputError: it did not pass through all layers, both ways.
        """
        self.gradients.collect()
        self.state.finish()

    def passed(self) -> None:
        """A commit operation of this epoch has passed: everybody holds what it is to host, the rest may go.

        The rows stay as many as they are: the reduced gradients lie in the same order.
        """
        self.untouched = False
        self._count_loads()
        if (self._counts > 0).sum() != (self._placed > 0).sum():
            for layer, names in enumerate(_names(self._placed)):
                self.shards.rearrange(layer, names)
        self._counts = self._placed

    def _count_loads(self) -> None:
        """Add the step that has passed; an attempt that was undone does not count."""
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
        """Steps from one report of the loads to the next."""
        return max(self._window // REPORTS_PER_WINDOW, 1)

    @property
    def token_s(self) -> float:
        """Seconds that an expert takes for a token here, forward and backward; 0 before anything was measured."""
        return self._clock.token_s

    @property
    def expert_bytes(self) -> int:
        """What the largest expert has in parameters and optimizer state."""
        return max(spec.nbytes for spec in self.specs())

    def verify(self, comm: Communicator) -> None:
        """Compare all copies of each expert, on all ranks.

        Raises:
            ReplicasDifferError: on all ranks.
            HaltedError, PeerLostError: abandoned or failed.
        """
        verify_replicas(comm, self.shards)

    # ---- checkpoints ----

    def gather(self, comm: Communicator, *, wanted: bool) -> dict[str, torch.Tensor] | None:
        """Bring all experts to rank 0, on all ranks; return them there by name if it wanted them.

        Args:
            wanted: rank 0 can write a checkpoint now; what the others say does not count.

        Raises:
            HaltedError, PeerLostError: abandoned or failed.
        """
        device = self.layers[0].experts.w1.device
        flags = torch.empty(comm.size, dtype=torch.int64, device=device)
        comm.wait(comm.start_all_gather(flags, torch.tensor([int(wanted)], device=device)))
        if not int(flags[0]):
            return None
        everything = tuple((tuple(range(self.experts)), *layer[1:]) for layer in self._placement)
        moves = plan_moves(self._placement, everything, [self.experts] * len(self.layers))
        staged = stage(comm, self.shards, held=self._placement, wanted=everything, transfers=moves)
        return rows_of(self.shards, staged.arrived) if comm.rank == 0 else None

    def specs(self) -> tuple[LayerSpec, ...]:
        """Return what each layer keeps per expert and beside them."""
        return tuple(self.shards.describe(layer) for layer in range(len(self.layers)))

    def wanted_of(self, plan: ExpertPlan | None, rank: int) -> IntArray:
        """Return the experts that a plan gives this rank, `(L, E)`; all of them without a plan."""
        if plan is None:
            return np.ones((len(self.layers), self.experts), dtype=np.int64)
        return decode(plan.placement[rank], self.shape(1))

    def adopt(
        self,
        counts: IntArray,
        specs: Sequence[LayerSpec],
        arrived: Mapping[int, Mapping[tuple[int, str], torch.Tensor]],
    ) -> None:
        """Let the experts of a checkpoint live here, and no others."""
        for layer, spec in enumerate(specs):
            self.shards.adopt(layer, spec)
        self._hold(counts, arrived)


def experts_of(model: nn.Module, optimizer: Optimizer) -> JobExperts | None:
    """Return the experts of a model, None for a dense one.

    Raises:
        BadInputError: its layers differ in their number of experts.
    """
    layers = moe_layers(model)
    return JobExperts(layers, optimizer) if layers else None


def _names(counts: IntArray) -> tuple[tuple[int, ...], ...]:
    """Return the distinct experts per layer, ascending."""
    return tuple(tuple(int(expert) for expert in np.flatnonzero(row)) for row in counts)


def _rows(counts: IntArray) -> tuple[int, ...]:
    """Return how many rows the experts of each layer need; never none: a stack needs one to be multiplied with."""
    return tuple(max(1, len(names)) for names in _names(counts))
