"""Experts that travel beside a step: what this rank sends of its rows, what comes to it, and when all of that is here.

The rows that are sent are the live ones; they do not change before the step is applied. What comes lies beside what is
here until then. How it is carried is for others (runtime/state/parcels.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import torch

from holdfast.runtime.moe.holding.migrate import plan_moves
from holdfast.runtime.moe.holding.saving import empty_rows, row_name
from holdfast.runtime.moe.holding.shards import ExpertShards, LayerSpec
from holdfast.runtime.moe.hosts import Placement
from holdfast.runtime.state import tree
from holdfast.runtime.state.state import Manifest, StateMismatchError, StateView, TensorSpec

#: (layer, expert)
Pair = tuple[int, int]


class BackgroundMigration:
    """One rank's part of a migration; the plan is the same in all eyes."""

    def __init__(self, shards: ExpertShards, held: Placement, wanted: Placement, rank: int) -> None:
        """Plan it; nothing has come yet.

        Args:
            held, wanted: per layer and rank.

        Raises:
            LostExpertsError: something is wanted that nobody holds.
        """
        self._shards = shards
        #: what goes to each rank, and what comes from each
        self.outgoing: dict[int, list[Pair]] = {}
        self.incoming: dict[int, list[Pair]] = {}
        for layer, expert, source, to in plan_moves(held, wanted, shards.expert_counts).as_tuples():
            if source == rank:
                self.outgoing.setdefault(to, []).append((layer, expert))
            if to == rank:
                self.incoming.setdefault(source, []).append((layer, expert))
        #: per layer, rows that have come by (expert, name of the tensor); only what is whole
        self.arrived: tuple[dict[tuple[int, str], torch.Tensor], ...] = tuple({} for _ in shards.layers)

    @property
    def receivers(self) -> Collection[int]:
        """The ranks that this one sends something to."""
        return self.outgoing

    @property
    def senders(self) -> Collection[int]:
        """The ranks that something comes from."""
        return self.incoming

    def view(self, to: int) -> StateView:
        """Return the live rows that go to a rank, and what they are."""
        specs = self._specs()
        pairs = self.outgoing[to]
        tensors = [self._shards.row(layer, expert, row) for layer, expert in pairs for row in specs[layer].rows]
        return StateView(manifest=_manifest(pairs, specs), tensors=tensors)

    def prepare(self, source: int, manifest: Manifest) -> list[torch.Tensor]:
        """Return tensors for what comes from a rank.

        Raises:
            StateMismatchError: it is not what that rank is to send, or its optimizer keeps another state than this
                one's. Here all have taken the same steps.
        """
        specs, pairs = self._specs(), self.incoming[source]
        if manifest != _manifest(pairs, specs):
            raise StateMismatchError(f"the experts of rank {source} are not those of the plan, or of another kind")
        device = self._shards.layers[0].experts.device
        rows = empty_rows(specs, _by_layer(pairs, len(specs)), device)
        return [rows[layer][expert, row.name] for layer, expert in pairs for row in specs[layer].rows]

    def on_received(self, source: int, tensors: Sequence[torch.Tensor]) -> None:
        """All is here that comes from a rank: it lies in the tensors of `prepare`."""
        specs, rows = self._specs(), iter(tensors)
        for layer, expert in self.incoming[source]:
            for row in specs[layer].rows:
                self.arrived[layer][expert, row.name] = next(rows)

    def _specs(self) -> tuple[LayerSpec, ...]:
        return tuple(self._shards.describe(layer) for layer in range(len(self._shards.layers)))


def _manifest(pairs: Sequence[Pair], specs: Sequence[LayerSpec]) -> Manifest:
    """Return what the rows of experts are, in the order in which they travel, and what belongs to all of them."""
    tensors = tuple(
        TensorSpec(row_name(layer, expert, row.name), row.dtype, row.shape, host=False)
        for layer, expert in pairs
        for row in specs[layer].rows
    )
    values = [msgspec.to_builtins(spec.values) for spec in specs]
    beside = tree.pack(values, None, "optimizer state of experts")
    return Manifest(tensors=tensors, parameters=0, buffers=0, optimizer=beside, extra={})


def _by_layer(pairs: Sequence[Pair], layers: int) -> list[list[int]]:
    experts: list[list[int]] = [[] for _ in range(layers)]
    for layer, expert in pairs:
        experts[layer].append(expert)
    return experts
