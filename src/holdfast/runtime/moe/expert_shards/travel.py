"""A migration of experts in the background of a step: rows that this rank sends and receives.

The live rows are sent; they do not change before the step is applied. Received rows are stored separately until then.
`runtime/state/parcels.py` sends and receives them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import torch

from holdfast.runtime.moe.expert_shards.migrate import plan_moves
from holdfast.runtime.moe.expert_shards.saving import empty_rows, row_name
from holdfast.runtime.moe.expert_shards.shards import ExpertShards, LayerSpec
from holdfast.runtime.moe.hosts import Placement
from holdfast.runtime.state import tree
from holdfast.runtime.state.state import Manifest, StateMismatchError, StateView, TensorSpec

#: (layer, expert)
Pair = tuple[int, int]


class BackgroundMigration:
    """One rank's part of a migration; the plan is the same on all ranks."""

    def __init__(self, shards: ExpertShards, held: Placement, wanted: Placement, rank: int) -> None:
        """Plan the migration: which pairs this rank sends to and receives from each rank. Nothing is sent here.

        Args:
            held, wanted: per layer and rank.

        Raises:
            LostExpertsError: no rank has an expert that is wanted.
        """
        self._shards = shards
        #: the pairs to send to each rank
        self.outgoing: dict[int, list[Pair]] = {}
        #: the pairs to receive from each rank
        self.incoming: dict[int, list[Pair]] = {}
        for layer, expert, source, to in plan_moves(held, wanted, shards.expert_counts).as_tuples():
            if source == rank:
                self.outgoing.setdefault(to, []).append((layer, expert))
            if to == rank:
                self.incoming.setdefault(source, []).append((layer, expert))
        #: per layer, completely received rows by (expert, name of the tensor)
        self.arrived: tuple[dict[tuple[int, str], torch.Tensor], ...] = tuple({} for _ in shards.layers)

    @property
    def receivers(self) -> Collection[int]:
        """The ranks that this one sends experts to."""
        return self.outgoing

    @property
    def senders(self) -> Collection[int]:
        """The ranks that send experts to this one."""
        return self.incoming

    def view(self, to: int) -> StateView:
        """Return the live rows of the experts for the rank `to`, one expert after the other, and their description."""
        specs = self._specs()
        pairs = self.outgoing[to]
        tensors = [self._shards.row(layer, expert, row) for layer, expert in pairs for row in specs[layer].rows]
        return StateView(manifest=_manifest(pairs, specs), tensors=tensors)

    def prepare(self, source: int, manifest: Manifest) -> list[torch.Tensor]:
        """Check the description of a rank's experts, and return new tensors to receive them into, in that order.

        Raises:
            StateMismatchError: the manifest is not the planned one, or the sender's optimizer has another kind of
                state. All members have taken the same steps, so the kinds should be equal.
        """
        specs, pairs = self._specs(), self.incoming[source]
        if manifest != _manifest(pairs, specs):
            raise StateMismatchError(f"the experts of rank {source} differ from the plan, in number or kind")
        device = self._shards.layers[0].experts.device
        rows = empty_rows(specs, _by_layer(pairs, len(specs)), device)
        return [rows[layer][expert, row.name] for layer, expert in pairs for row in specs[layer].rows]

    def on_received(self, source: int, tensors: Sequence[torch.Tensor]) -> None:
        """Record the rows of a rank, after its tensors from `prepare` were filled."""
        specs, rows = self._specs(), iter(tensors)
        for layer, expert in self.incoming[source]:
            for row in specs[layer].rows:
                self.arrived[layer][expert, row.name] = next(rows)

    def _specs(self) -> tuple[LayerSpec, ...]:
        return tuple(self._shards.describe(layer) for layer in range(len(self._shards.layers)))


def _manifest(pairs: Sequence[Pair], specs: Sequence[LayerSpec]) -> Manifest:
    """Return the manifest of experts' rows, in the order of transfer, with the values that they share."""
    tensors = tuple(
        TensorSpec(row_name(layer, expert, row.name), row.dtype, row.shape, host=False)
        for layer, expert in pairs
        for row in specs[layer].rows
    )
    values = [msgspec.to_builtins(spec.values) for spec in specs]
    shared = tree.pack(values, None, "optimizer state of experts")
    return Manifest(tensors=tensors, parameters=0, buffers=0, optimizer=shared, extra={})


def _by_layer(pairs: Sequence[Pair], layers: int) -> list[list[int]]:
    """Return the experts of (layer, expert) pairs as one list for each of `layers` layers."""
    experts: list[list[int]] = [[] for _ in range(layers)]
    for layer, expert in pairs:
        experts[layer].append(expert)
    return experts
