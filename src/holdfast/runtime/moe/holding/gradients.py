"""Expert gradients of all layers at once: one uneven all-to-all is the reduce-scatter, a second one the all-gather.

Out of place, like the dense reduction: the local sums stay intact until the step has passed. Each shard is summed by
one rank, in rank order, and that rank's bits go to all hosts, so replicas stay equal in every bit. An expert with a
single host needs no all-to-all. Where experts travel beside the step, their hosts are others once it is applied: the
sums are made by those that have computed, as ever, and go to those that are to apply them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.runtime.groups.communicator import Communicator, Pending
from holdfast.runtime.moe.holding.shares import Item, ShardGroup, ShardGroupKey, group_items
from holdfast.runtime.moe.hosts import Placement
from holdfast.runtime.moe.layer.expert_layer import ExpertLayer
from holdfast.runtime.reduction.bucket import add_up
from holdfast.runtime.reduction.reduction import replacing
from holdfast.runtime.reduction.squares import Reduced
from holdfast.runtime.tensors import copy_each, pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class _AllToAll:
    """One of the two all-to-alls: flat buffers, splits per rank, and the views that fill and empty them."""

    send: torch.Tensor
    receive: torch.Tensor
    send_splits: list[int]
    receive_splits: list[int]
    #: Views of elsewhere, in the order in which they lie in `send`.
    sources: list[torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class NextPlacement:
    """Where the experts live once a step is applied: per layer and rank, and on this rank the expert of each row."""

    placement: Placement
    rows: Sequence[tuple[int, ...]]


class ExpertGradients:
    """Local and reduced gradients of the experts that live here.

    While the local ones are in use, every expert parameter's `grad` is a buffer of ours and is accumulated in place.
    Rows not in use have zero gradients, always.
    """

    everywhere = True

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        placement: Placement,
        comm: Communicator,
        next_placement: NextPlacement | None = None,
    ) -> None:
        """Take over the gradients of the layers' experts.

        Args:
            layers: all MoE layers of the model, bound to the placement; all of one dtype.
            placement: per layer and rank.
            comm: the group of all members.
            following: where the experts live once the reduced gradients are applied; None: where they do now.

        Raises:
            ValueError: the experts are of several dtypes.
        """
        dtypes = {weight.dtype for layer in layers for weight in layer.experts.weights().values()}
        if len(dtypes) > 1:
            raise ValueError(f"expert parameters have several dtypes: {sorted(str(dtype) for dtype in dtypes)}")
        self._layers = list(layers)
        self._comm = comm
        then = placement if next_placement is None else next_placement.placement
        self._placed = [set(held[comm.rank]) for held in then]
        #: the expert of each row of the local gradients, and of the reduced ones
        self._local_rows = [layer.experts.row_experts for layer in layers]
        self._reduced_rows = self._local_rows if next_placement is None else list(next_placement.rows)
        self._weights = [layer.experts.weights() for layer in layers]
        sizes = [{name: w[0].numel() for name, w in weights.items()} for weights in self._weights]
        everybody = group_items(placement, sizes, then)
        mine = [family for family in everybody if comm.rank in (*family.hosts, *family.receivers)]
        #: Whether any expert of the job has a second host, or another one then; else no all-to-all is needed anywhere.
        self._replicated = not all(family.is_local for family in everybody)
        self._unreplicated = [family for family in mine if family.is_local]
        self._shared = [family for family in mine if not family.is_local]
        self._summed = [family for family in self._shared if comm.rank in family.hosts]
        self._local = [{name: torch.zeros_like(w) for name, w in weights.items()} for weights in self._weights]
        self._allocate_buffers()
        self.use_local()

    @property
    def numel(self) -> int:
        """How many gradient elements there are here."""
        return sum(buffer.numel() for layer in self._local for buffer in layer.values())

    def zero(self) -> None:
        """Begin a step."""
        for buffers in self._local:
            for buffer in buffers.values():
                buffer.zero_()
        self.use_local()

    def collect(self) -> None:
        """After each backward: take in gradients that went elsewhere because user code had reset `grad`."""
        with torch.no_grad():
            for weights, buffers in zip(self._weights, self._local, strict=True):
                for name, weight in weights.items():
                    if weight.grad is not None and weight.grad is not buffers[name]:
                        buffers[name].add_(weight.grad)
                    weight.grad = buffers[name]

    def use_local(self) -> None:
        """Let every `grad` be this rank's own sum."""
        self._set_gradients(self._local)

    def use_reduced(self) -> None:
        """Let every `grad` be the reduced gradient."""
        self._set_gradients(self._reduced)

    @torch.no_grad()
    def reduce_scatter(self, comm: Communicator, scale: float) -> Reduced:
        """Sum this rank's shards of each expert's gradients over its hosts, times `scale`. All ranks must call it.

        Args:
            comm: the group of the placement, or a wrapper of it.
            scale: 1 / (M * loss scale), with M micro-batches in the whole step.

        Returns:
            This rank's part of the squared norm and of the non-finite count: every expert counts once in the job.

        Raises:
            HaltedError, PeerLostError: abandoned or failed. The local gradients are intact, the reduced ones lost.
        """
        with replacing(self._allocate_buffers):
            scatter = self._start_all_to_all(comm, self._scatter) if self._replicated else None
            shards = [self._reduce_unreplicated(item, scale) for family in self._unreplicated for item in family.items]
            if scatter is not None:
                comm.wait(scatter)
                shards += [self._sum_shards(family, scale) for family in self._summed]
        return Reduced.all_of(shards)

    @torch.no_grad()
    def all_gather(self, comm: Communicator, factor: float) -> None:
        """Multiply the shards by `factor`, and bring each to all hosts of its expert. All ranks must call it.

        Raises:
            HaltedError, PeerLostError: abandoned or failed. The local gradients are intact, the reduced ones lost.
        """
        if factor != 1.0:
            alone = [self._reduced_gradient(item) for family in self._unreplicated for item in family.items]
            for part in (*alone, *self._owned.values()):
                part.mul_(factor)
        with replacing(self._allocate_buffers):
            if self._replicated:
                comm.wait(self._start_all_to_all(comm, self._gather))
        if self._landing:
            copy_each(self._landing, self._arrived)

    def _start_all_to_all(self, comm: Communicator, traffic: _AllToAll) -> Pending:
        if traffic.sources:
            torch.cat(traffic.sources, out=traffic.send)
        return comm.start_all_to_all(traffic.receive, traffic.send, traffic.receive_splits, traffic.send_splits)

    def _reduce_unreplicated(self, item: Item, scale: float) -> Reduced:
        reduced = self._reduced_gradient(item)
        torch.mul(self._local_gradient(item), scale, out=reduced)
        return Reduced.of_pieces(reduced, [reduced.numel()])

    def _sum_shards(self, family: ShardGroup, scale: float) -> Reduced:
        """Sum this rank's shards of a family in rank order, whoever they came from."""
        shard, versions = self._owned[family.key], self._versions[family.key]
        own = self._local_shards(family, self._comm.rank)
        torch.cat(own, out=versions[family.hosts.index(self._comm.rank)])
        add_up(versions, shard, scale)
        return Reduced.of_pieces(shard, [part.numel() for part in own])

    # ---- buffers and views ----

    def _set_gradients(self, buffers: list[dict[str, torch.Tensor]]) -> None:
        for weights, layer in zip(self._weights, buffers, strict=True):
            for name, weight in weights.items():
                weight.grad = layer[name]

    def _allocate_reduced(self) -> list[dict[str, torch.Tensor]]:
        """Return buffers whose rows in use every reduction fills; zero where no expert is that works here."""
        buffers = [
            {name: w.new_empty((len(rows), *w.shape[1:])) for name, w in weights.items()}
            for weights, rows in zip(self._weights, self._reduced_rows, strict=True)
        ]
        for rows, stacks, placed in zip(self._reduced_rows, buffers, self._placed, strict=True):
            for row, expert in enumerate(rows):
                for stack in stacks.values() if expert not in placed else ():
                    stack[row].zero_()
        return buffers

    def _allocate_buffers(self) -> None:
        """Make everything that an all-to-all writes to, and the views into it, anew."""
        self._reduced = self._allocate_reduced()
        first = next((w for weights in self._weights for w in weights.values()), torch.empty(0))
        rank = self._comm.rank
        self._owned = {family.key: first.new_empty(family.shard_length(rank)) for family in self._summed}
        self._scatter = self._lay_out_all_to_all(first, self._parts_to_sum)
        self._gather = self._lay_out_all_to_all(first, self._parts_to_gather)
        self._versions = self._versions_by_host(rank)
        self._landing, self._arrived = self._gathered_views(rank)

    def _parts_to_sum(self, family: ShardGroup, peer: int) -> tuple[list[torch.Tensor], int]:
        """Each host's version of a shard goes to the host that sums it up."""
        if self._comm.rank not in family.hosts or peer not in family.hosts:
            return [], 0
        return self._local_shards(family, peer), family.shard_length(self._comm.rank)

    def _parts_to_gather(self, family: ShardGroup, peer: int) -> tuple[list[torch.Tensor], int]:
        """Each sum goes to all that are to apply it."""
        rank = self._comm.rank
        leaving = [self._owned[family.key]] if rank in family.hosts and peer in family.receivers else []
        return leaving, family.shard_length(peer) if peer in family.hosts and rank in family.receivers else 0

    def _lay_out_all_to_all(
        self, like: torch.Tensor, between: Callable[[ShardGroup, int], tuple[list[torch.Tensor], int]]
    ) -> _AllToAll:
        """Lay out one all-to-all with every peer.

        Args:
            like: gives dtype and device.
            between: what of a family goes to a peer, and how many elements come from it.
        """
        rank = self._comm.rank
        sources: list[torch.Tensor] = []
        send_splits, receive_splits = [0] * self._comm.size, [0] * self._comm.size
        for peer in range(self._comm.size):
            if peer == rank:
                continue
            passed = [between(family, peer) for family in self._shared]
            leaving = [part for parts, _ in passed for part in parts]
            sources += leaving
            send_splits[peer] = sum(part.numel() for part in leaving)
            receive_splits[peer] = sum(coming for _, coming in passed)
        return _AllToAll(
            send=like.new_empty(sum(send_splits)),
            receive=like.new_empty(sum(receive_splits)),
            send_splits=send_splits,
            receive_splits=receive_splits,
            sources=sources,
        )

    def _local_shards(self, family: ShardGroup, owner: int) -> list[torch.Tensor]:
        """Return an owner's shards of this rank's gradients of all items of a family, as flat views."""
        return [self._local_gradient(item)[family.shard(item, owner)] for item in family.items]

    def _local_gradient(self, item: Item) -> torch.Tensor:
        row = self._local_rows[item.layer].index(item.expert)
        return self._local[item.layer][item.weight][row].view(-1)

    def _reduced_gradient(self, item: Item) -> torch.Tensor:
        row = self._reduced_rows[item.layer].index(item.expert)
        return self._reduced[item.layer][item.weight][row].view(-1)

    def _received_parts(self, traffic: _AllToAll, peer: int, lengths: list[int]) -> list[torch.Tensor]:
        start = sum(traffic.receive_splits[:peer])
        return list(pieces(traffic.receive[start : start + sum(lengths)], lengths))

    def _versions_by_host(self, rank: int) -> dict[ShardGroupKey, list[torch.Tensor]]:
        """Return all hosts' versions of this rank's shards, in rank order."""
        found: dict[ShardGroupKey, list[torch.Tensor]] = {f.key: [] for f in self._summed}
        for peer in range(self._comm.size):
            common = [family for family in self._summed if peer in family.hosts]
            lengths = [family.shard_length(rank) for family in common]
            own = [torch.empty_like(self._owned[family.key]) for family in common] if peer == rank else None
            parts = own or self._received_parts(self._scatter, peer, lengths)
            for family, part in zip(common, parts, strict=True):
                found[family.key].append(part)
        return found

    def _gathered_views(self, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return views of the reduced gradients, and what is to be copied into each."""
        landing: list[torch.Tensor] = []
        arrived: list[torch.Tensor] = []
        for peer in range(self._comm.size):
            common = [family for family in self._shared if peer in family.hosts and rank in family.receivers]
            lengths = [family.shard_length(peer) for family in common]
            own = [self._owned[family.key] for family in common] if peer == rank else None
            shards = own or self._received_parts(self._gather, peer, lengths)
            for family, shard in zip(common, shards, strict=True):
                places = [self._reduced_gradient(item)[family.shard(item, peer)] for item in family.items]
                landing += places
                arrived += pieces(shard, [place.numel() for place in places])
        return landing, arrived
