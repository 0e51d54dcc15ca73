"""Expert gradients of all layers at once: one uneven all-to-all is the reduce-scatter, another one the all-gather.

Out of place, like the dense reduction: the local sums stay intact until the step has passed. Each shard is summed by
one rank, in rank order, and sent to all hosts, so replicas are equal in every bit. An expert with a single host needs
no all-to-all.

During a background migration, the hosts change when the step is applied. The ranks that computed the gradients sum
them, and send the sums to the ranks that will apply them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.runtime.groups.communicator import Communicator, Pending
from holdfast.runtime.moe.expert_shards.shares import Item, ShardGroup, ShardGroupKey, group_items
from holdfast.runtime.moe.hosts import Placement
from holdfast.runtime.moe.layer.expert_layer import ExpertLayer
from holdfast.runtime.reduction.bucket import sum_versions
from holdfast.runtime.reduction.reduction import reallocate_on_failure
from holdfast.runtime.reduction.squares import GradientSummary
from holdfast.runtime.tensors import copy_each, split_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _AllToAll:
    """One of the two all-to-alls: flat buffers, split sizes per rank, and the views that are sent."""

    send: torch.Tensor
    receive: torch.Tensor
    send_splits: list[int]
    receive_splits: list[int]
    #: the views to send, in the order of `send`
    sources: list[torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class NextPlacement:
    """The placement of the experts after the step is applied."""

    #: per layer and rank
    placement: Placement
    #: on this rank, the expert of each row, per layer
    rows: Sequence[tuple[int, ...]]


class ExpertGradients:
    """Local and reduced gradients of the experts on this rank.

    While the local ones are in use, every expert parameter's `grad` is a buffer of this class, and autograd adds to it
    in place. Unused rows always have zero gradients.
    """

    over_all_workers = True

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        placement: Placement,
        comm: Communicator,
        next_placement: NextPlacement | None = None,
    ) -> None:
        """Replace the gradients of the layers' experts by own buffers.

        Args:
            layers: all MoE layers of the model, bound to the placement; all of one dtype.
            placement: per layer and rank.
            comm: the group of all members.
            next_placement: the placement when the reduced gradients are applied; None if it does not change.

        Raises:
            ValueError: the experts have several dtypes.
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
        all_groups = group_items(placement, sizes, then)
        mine = [group for group in all_groups if comm.rank in (*group.hosts, *group.receivers)]
        #: whether any expert of the job has several hosts, or changes its host; if not, no all-to-all is needed
        self._replicated = not all(group.is_local for group in all_groups)
        self._unreplicated = [group for group in mine if group.is_local]
        self._shared = [group for group in mine if not group.is_local]
        self._summed = [group for group in self._shared if comm.rank in group.hosts]
        self._local = [{name: torch.zeros_like(w) for name, w in weights.items()} for weights in self._weights]
        self._allocate_buffers()
        self.use_local()

    @property
    def numel(self) -> int:
        """The number of gradient elements on this rank."""
        return sum(buffer.numel() for layer in self._local for buffer in layer.values())

    def zero(self) -> None:
        """Start a step: set this rank's sums to zero, and use them as every `grad`."""
        for buffers in self._local:
            for buffer in buffers.values():
                buffer.zero_()
        self.use_local()

    def collect(self) -> None:
        """Add gradients that autograd put elsewhere because user code had reset `grad`, and restore `grad`.

        Called after each backward.
        """
        with torch.no_grad():
            for weights, buffers in zip(self._weights, self._local, strict=True):
                for name, weight in weights.items():
                    if weight.grad is not None and weight.grad is not buffers[name]:
                        buffers[name].add_(weight.grad)
                    weight.grad = buffers[name]

    def use_local(self) -> None:
        """Set every `grad` to this rank's own sum."""
        self._set_gradients(self._local)

    def use_reduced(self) -> None:
        """Set every `grad` to the reduced gradient."""
        self._set_gradients(self._reduced)

    @torch.no_grad()
    def reduce_scatter(self, comm: Communicator, scale: float) -> GradientSummary:
        """Sum this rank's shards of each expert's gradients over its hosts, times `scale`. All ranks must call it.

        Experts with one host are only scaled. The sums are complete on all hosts after `all_gather`.

        Args:
            comm: the group of the placement, or a wrapper of it.
            scale: 1 / (M * loss scale), with M micro-batches in the whole step.

        Returns:
            This rank's part of the squared norm and of the non-finite count: every expert counts once in the job.

        Raises:
            HaltedError, PeerLostError: abandoned or failed. The local gradients are intact, the reduced ones lost.
        """
        with reallocate_on_failure(self._allocate_buffers):
            scatter = self._start_all_to_all(comm, self._scatter) if self._replicated else None
            shards = [self._reduce_unreplicated(item, scale) for group in self._unreplicated for item in group.items]
            if scatter is not None:
                comm.wait(scatter)
                shards += [self._sum_shards(group, scale) for group in self._summed]
        return GradientSummary.combine(shards)

    @torch.no_grad()
    def all_gather(self, comm: Communicator, factor: float) -> None:
        """Multiply the shards by `factor`, and send each to all hosts of its expert. All ranks must call it.

        Afterwards the reduced gradients are complete on all hosts, and equal in every bit.

        Raises:
            HaltedError, PeerLostError: abandoned or failed. The local gradients are intact, the reduced ones lost.
        """
        if factor != 1.0:
            alone = [self._reduced_gradient(item) for group in self._unreplicated for item in group.items]
            for part in (*alone, *self._owned.values()):
                part.mul_(factor)
        with reallocate_on_failure(self._allocate_buffers):
            if self._replicated:
                comm.wait(self._start_all_to_all(comm, self._gather))
        if self._landing:
            copy_each(self._landing, self._arrived)

    def _start_all_to_all(self, comm: Communicator, traffic: _AllToAll) -> Pending:
        """Fill the send buffer, and start an all-to-all; the caller waits for it."""
        if traffic.sources:
            torch.cat(traffic.sources, out=traffic.send)
        return comm.start_all_to_all(traffic.receive, traffic.send, traffic.receive_splits, traffic.send_splits)

    def _reduce_unreplicated(self, item: Item, scale: float) -> GradientSummary:
        """Write the scaled gradient of a weight that only this rank has to the reduced ones; return its summary."""
        reduced = self._reduced_gradient(item)
        torch.mul(self._local_gradient(item), scale, out=reduced)
        return GradientSummary.from_pieces(reduced, [reduced.numel()])

    def _sum_shards(self, group: ShardGroup, scale: float) -> GradientSummary:
        """Sum all hosts' versions of this rank's shards of a group in rank order, times `scale`; return a summary."""
        shard, versions = self._owned[group.key], self._versions[group.key]
        own = self._local_shards(group, self._comm.rank)
        torch.cat(own, out=versions[group.hosts.index(self._comm.rank)])
        sum_versions(versions, shard, scale)
        return GradientSummary.from_pieces(shard, [part.numel() for part in own])

    # ---- buffers and views ----

    def _set_gradients(self, buffers: list[dict[str, torch.Tensor]]) -> None:
        """Set the `grad` of each expert parameter to its buffer; `buffers` are per layer, by name."""
        for weights, layer in zip(self._weights, buffers, strict=True):
            for name, weight in weights.items():
                weight.grad = layer[name]

    def _allocate_reduced(self) -> list[dict[str, torch.Tensor]]:
        """Return buffers for the reduced gradients, per layer by name; every reduction fills the used rows.

        Rows without an expert of this rank are zero.
        """
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
        """Allocate the reduced gradients, the shards, and the buffers of both all-to-alls, with all views into them."""
        self._reduced = self._allocate_reduced()
        first = next((w for weights in self._weights for w in weights.values()), torch.empty(0))
        rank = self._comm.rank
        self._owned = {group.key: first.new_empty(group.shard_length(rank)) for group in self._summed}
        self._scatter = self._lay_out_all_to_all(first, self._parts_to_sum)
        self._gather = self._lay_out_all_to_all(first, self._parts_to_gather)
        self._versions = self._versions_by_host(rank)
        self._landing, self._arrived = self._gathered_views(rank)

    def _parts_to_sum(self, group: ShardGroup, peer: int) -> tuple[list[torch.Tensor], int]:
        """Return this rank's versions of the shards that a peer sums, and how many elements to receive from it.

        ([], 0) if they do not both host the experts of the group.
        """
        if self._comm.rank not in group.hosts or peer not in group.hosts:
            return [], 0
        return self._local_shards(group, peer), group.shard_length(self._comm.rank)

    def _parts_to_gather(self, group: ShardGroup, peer: int) -> tuple[list[torch.Tensor], int]:
        """Return the sums that a peer will apply, and the number of elements to receive from the peer.

        No sums if this rank does not host the group's experts, 0 if it will not apply them.
        """
        rank = self._comm.rank
        leaving = [self._owned[group.key]] if rank in group.hosts and peer in group.receivers else []
        return leaving, group.shard_length(peer) if peer in group.hosts and rank in group.receivers else 0

    def _lay_out_all_to_all(
        self, like: torch.Tensor, between: Callable[[ShardGroup, int], tuple[list[torch.Tensor], int]]
    ) -> _AllToAll:
        """Allocate the buffers of one all-to-all with every peer, and list the views to send and the split sizes.

        Args:
            like: gives dtype and device.
            between: returns the tensors of a group for a peer, and the number of elements to receive from it.
        """
        rank = self._comm.rank
        sources: list[torch.Tensor] = []
        send_splits, receive_splits = [0] * self._comm.size, [0] * self._comm.size
        for peer in range(self._comm.size):
            if peer == rank:
                continue
            passed = [between(group, peer) for group in self._shared]
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

    def _local_shards(self, group: ShardGroup, owner: int) -> list[torch.Tensor]:
        """Return an owner's shards of this rank's gradients of all items of a group, as flat views."""
        return [self._local_gradient(item)[group.shard(item, owner)] for item in group.items]

    def _local_gradient(self, item: Item) -> torch.Tensor:
        row = self._local_rows[item.layer].index(item.expert)
        return self._local[item.layer][item.weight][row].view(-1)

    def _reduced_gradient(self, item: Item) -> torch.Tensor:
        row = self._reduced_rows[item.layer].index(item.expert)
        return self._reduced[item.layer][item.weight][row].view(-1)

    def _received_parts(self, traffic: _AllToAll, peer: int, lengths: list[int]) -> list[torch.Tensor]:
        """Return a peer's part of the receive buffer, split into views of these lengths."""
        start = sum(traffic.receive_splits[:peer])
        return list(split_tensor(traffic.receive[start : start + sum(lengths)], lengths))

    def _versions_by_host(self, rank: int) -> dict[ShardGroupKey, list[torch.Tensor]]:
        """Return all hosts' versions of this rank's shards, in rank order, by group.

        Those of peers are views of received data, and this rank's own is a new buffer.
        """
        found: dict[ShardGroupKey, list[torch.Tensor]] = {f.key: [] for f in self._summed}
        for peer in range(self._comm.size):
            common = [group for group in self._summed if peer in group.hosts]
            lengths = [group.shard_length(rank) for group in common]
            own = [torch.empty_like(self._owned[group.key]) for group in common] if peer == rank else None
            parts = own or self._received_parts(self._scatter, peer, lengths)
            for group, part in zip(common, parts, strict=True):
                found[group.key].append(part)
        return found

    def _gathered_views(self, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return views of the reduced gradients, and the sums of this rank and its peers to copy into them."""
        landing: list[torch.Tensor] = []
        arrived: list[torch.Tensor] = []
        for peer in range(self._comm.size):
            common = [group for group in self._shared if peer in group.hosts and rank in group.receivers]
            lengths = [group.shard_length(peer) for group in common]
            own = [self._owned[group.key] for group in common] if peer == rank else None
            shards = own or self._received_parts(self._gather, peer, lengths)
            for group, shard in zip(common, shards, strict=True):
                places = [self._reduced_gradient(item)[group.shard(item, peer)] for item in group.items]
                landing += places
                arrived += split_tensor(shard, [place.numel() for place in places])
        return landing, arrived
