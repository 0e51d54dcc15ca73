"""One flat buffer of gradients, which is summed and then gathered level by level of a communicator.

On each level, an all-to-all within the group brings each owner all versions of its part. The owner adds them in the
group's order, and continues with the sum on the next level. After the last level it has its shard: the sum over all
ranks, in an order that depends only on the levels. The all-gathers go back level by level. Each rank sends as many
bytes as without levels, in fewer and larger messages. With several workers on a node, only the owners' parts (the
node's sums) leave the node, once.

Sums are in float32 or wider. Half precision is rounded once: between levels such sums are sent as float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from holdfast.planning.levels import BLOCK
from holdfast.runtime.dtensor.local import is_dtensor, local_of
from holdfast.runtime.groups.communicator import Communicator, Pending
from holdfast.runtime.reduction.squares import GradientSummary, block_squares
from holdfast.runtime.state.memory import large_zeros

#: Elements that are summed, scaled and squared at a time, while they are in the cache.
CHUNK = 1 << 16
#: number of shards for which memory is allocated at first
FIRST_SHARDS = 64


def sum_versions(versions: Sequence[torch.Tensor], out: torch.Tensor, scale: float = 1.0) -> None:
    """Write the sum of the versions, in this order, times `scale`, into `out`. It is computed in float32 or wider; half
    precision is rounded once, at the end.

    So a mean fits into float16 even if the sum does not. Consecutive additions take half the time of torch.sum over the
    rows of a matrix.
    """
    if out.dtype.itemsize < torch.float32.itemsize:
        total = versions[0].to(torch.float32, copy=True)
        for version in versions[1:]:
            total.add_(version)
        out.copy_(total.mul_(scale))
        return
    if len(versions) == 1 or versions[0].dtype != out.dtype:
        out.copy_(versions[0])
        for version in versions[1:]:
            out.add_(version)
    else:
        torch.add(versions[0], versions[1], out=out)
        for version in versions[2:]:
            out.add_(version)
    if scale != 1.0:
        out.mul_(scale)


class ReceiveBuffer:
    """Receives the versions of one bucket while it is summed; buckets of one dtype and device share a few.

    A buffer for each bucket would need as much memory as the gradients.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Start without memory."""
        self._dtype = dtype
        self._device = device
        self._numel = 0
        self.allocate()

    def allocate(self) -> None:
        """Allocate new memory, because abandoned operations may still write to the old one."""
        self.buffer = large_zeros(self._numel, dtype=self._dtype, device=self._device)

    def ensure_size(self, numel: int) -> None:
        """Make the buffer large enough for `numel` elements; if it grows, it is new memory. Call it only while the
        buffer is unused.
        """
        if numel > self._numel:
            # More than is needed now, so that a growing world does not allocate at each of its sizes.
            self._numel = numel + numel // 8
            self.allocate()


class Bucket:
    """Flat buffers of some parameters of one dtype and device.

    For parameters that are spread over a replica group (layouts), everything here is about the part of this worker.

    `flat` holds this rank's gradients, and the reduced ones after they are gathered. After the `numel` gradient
    elements follow one flag per parameter (the number of ranks with a gradient), one more (the number of ranks with
    notes), and zeros, so that it can be cut into equal shards.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        counts: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """Allocate the buffers.

        Args:
            counts: whether this worker adds its squared norm to the total; False if another role has the same
                parameters.
            device: of the buffers without parameters. The notes of the ranks are reduced even then.
        """
        self.parameters = tuple(parameters)
        self.counts = counts
        #: this rank's gradients as autograd made them, or None
        self.local: list[torch.Tensor | None] = [None] * len(self.parameters)
        #: torch's version counters of `local` after the last backward, 0 for None
        self.versions = [0] * len(self.parameters)
        self._here = [local_of(parameter).detach() for parameter in parameters]
        #: the dtype and the device of its buffers
        self.kind = torch.float32, device or torch.device("cpu")
        if self._here:
            self.kind = self._here[0].dtype, self._here[0].device
        self._spread = any(is_dtensor(parameter) for parameter in parameters)
        self.numel = sum(parameter.numel() for parameter in self._here)
        self.used = self.numel + len(parameters) + 1
        #: whether this rank has notes of its micro-batches
        self.has_notes = False
        self._capacity = self.used + BLOCK * FIRST_SHARDS
        #: receives the versions, from `fill_buffer` to the last `sum_level`
        self._receive_buffer = ReceiveBuffer(*self.kind)
        #: start and size of this rank's part before each of its levels, and finally of its shard, if it owns one
        self._spans: list[tuple[int, int]] = []
        self.allocate_buffers()

    def allocate_buffers(self) -> None:
        """Allocate new buffers, because abandoned operations may still use the old ones."""
        self.flat = large_zeros(self._capacity, dtype=self.kind[0], device=self.kind[1])
        self.views = self._make_views(self.flat)
        #: float32 sums of half-precision gradients between levels, by level; 0 is the memory to receive them
        self._wide: dict[int, torch.Tensor] = {}
        #: received versions of the present level, (versions, elements), or None if this rank owns nothing there
        self._versions: torch.Tensor | None = None

    @property
    def local_parts(self) -> list[torch.Tensor | None]:
        """`local`, with the local part of each gradient that is a DTensor; None for a missing gradient."""
        if not self._spread:
            return self.local
        return [None if gradient is None else local_of(gradient) for gradient in self.local]

    def current_versions(self) -> list[int]:
        """Return torch's version counters of `local`, 0 for None."""
        return [0 if gradient is None else gradient._version for gradient in self.local_parts]

    def fill_buffer(self, comm: Communicator, receive_buffer: ReceiveBuffer | None = None) -> None:
        """Start a reduction: make `flat` large enough for all shards, and copy this rank's gradients and flags into it,
        zeros for missing gradients.

        Args:
            receive_buffer: receives the other ranks' versions; by default the last one, and at first an own one.
        """
        self._spans = _level_spans(comm, self.used)
        self._receive_buffer = receive_buffer or self._receive_buffer
        self._ensure_capacity(comm)
        flags = [*(gradient is not None for gradient in self.local), self.has_notes]
        self.flat[self.numel : self.used] = torch.tensor(flags, dtype=self.flat.dtype)
        for gradient, view in zip(self.local_parts, self.views, strict=True):
            if gradient is not None:
                view.copy_(gradient)
            else:
                view.zero_()

    def start_sums(self, comm: Communicator, level: int) -> Pending:
        """Start to exchange parts on a level: each owner receives all members' versions of its part, or NCCL's sum of
        them; a rank that owns nothing only sends. `sum_level` adds them.
        """
        group, owners = comm.groups[level], comm.owners[level]
        start, numel = self._spans[level]
        source = self._wide[level] if level and self._is_half else self.flat[start : start + numel]
        part = numel // owners
        if owners == group.size and group.prefers_reduce_scatter(source):
            self._versions = self._arrival_view(source, part).view(1, part)
            return group.start_reduce_scatter(self._versions[0], source)
        if owners == group.size:
            arrivals = self._arrival_view(source, group.size * part)
            self._versions = arrivals.view(group.size, part)
            return group.start_all_to_all(arrivals, source)
        owns = group.rank < owners
        arrivals = self._arrival_view(source, group.size * part * owns)
        self._versions = arrivals.view(group.size, part) if owns else None
        sent = [part] * owners + [0] * (group.size - owners)
        return group.start_all_to_all(arrivals, source, [part * owns] * group.size, sent)

    def sum_level(self, comm: Communicator, level: int, scale: float) -> GradientSummary:
        """Sum the received versions of a level into this rank's part. On the last level, multiply the sum by `scale`,
        and write it into its shard of `flat`.

        Returns:
            The summary of the shard on the last level, without norms if the bucket does not count. An empty one on all
            other levels, and if this rank owns nothing.
        """
        versions, self._versions = self._versions, None
        if versions is None:
            return GradientSummary()
        start, numel = self._spans[level + 1]
        last = level + 1 == len(comm.owners)
        if self._is_half and not last:
            total = self._wide[level + 1] = self._wide_buffer(level + 1, numel)
        else:
            total = self.flat[start : start + numel]
        gradients = min(max(self.numel - start, 0), numel)
        # A GPU does not profit from chunks, and each chunk would wait for the device.
        chunk = CHUNK if total.device.type == "cpu" else numel
        squares: list[torch.Tensor] = []
        for begin in range(0, numel, chunk):
            part = total[begin : begin + chunk]
            sum_versions(versions[:, begin : begin + chunk].unbind(0), part, scale if last else 1.0)
            if last and self.counts:
                squares.append(block_squares(part[: max(gradients - begin, 0)]))
        return GradientSummary.from_blocks(squares, total[:gradients])

    def start_spread(self, comm: Communicator, level: int) -> Pending:
        """Start to send the parts of a level from their owners to all members of the group, into `flat`."""
        group, owners = comm.groups[level], comm.owners[level]
        start, numel = self._spans[level]
        part, parts = numel // owners, self.flat[start : start + numel]
        mine = parts[group.rank * part : (group.rank + 1) * part]  # empty if this rank owns nothing
        return group.start_gather_from_owners(parts, mine, owners)

    def scale_shard(self, comm: Communicator, factor: float) -> None:
        """Multiply the gradients in this rank's shard by `factor`, but not the flags after them. Nothing if it owns no
        shard.
        """
        if len(self._spans) > len(comm.owners):
            start, numel = self._spans[-1]
            self.flat[start : min(start + numel, self.numel)].mul_(factor)

    def _ensure_capacity(self, comm: Communicator) -> None:
        """Enlarge the receive buffer and the flat buffers, if this world's shards need more than there is."""
        group, owners = comm.groups[0], comm.owners[0]
        _, needed = self._spans[0]
        self._receive_buffer.ensure_size(group.size * needed // owners)
        if needed > self._capacity:
            # More than is needed now, so that a growing world does not allocate at each of its sizes.
            self._capacity = needed + needed // 8
            self.allocate_buffers()

    @property
    def _is_half(self) -> bool:
        return self.flat.dtype.itemsize < torch.float32.itemsize

    def _arrival_view(self, source: torch.Tensor, numel: int) -> torch.Tensor:
        """Return memory of the source's dtype to receive a level into."""
        return self._receive_buffer.buffer[:numel] if source.dtype == self.flat.dtype else self._wide_buffer(0, numel)

    def _wide_buffer(self, level: int, numel: int) -> torch.Tensor:
        """Return float32 memory for a level, which is kept for the next reductions and enlarged if needed."""
        known = self._wide.get(level)
        if known is None or known.numel() < numel:
            known = large_zeros(numel, dtype=torch.float32, device=self.flat.device)
            self._wide[level] = known
        return known[:numel]

    def _make_views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a view of each parameter's gradient in a flat buffer, with the shape of its local part."""
        views: list[torch.Tensor] = []
        offset = 0
        for here in self._here:
            views.append(buffer[offset : offset + here.numel()].view(here.shape))
            offset += here.numel()
        return tuple(views)


def _level_spans(comm: Communicator, used: int) -> list[tuple[int, int]]:
    """Return start and size of this rank's part of the flat buffer before each of its levels, and finally of its shard.

    The first is the whole buffer, padded so that it can be cut into equal shards. A rank that owns nothing on a level
    has no later spans.

    Args:
        used: elements of the buffer without padding.
    """
    shards = math.prod(comm.owners)
    start, numel = 0, -(-used // (shards * BLOCK)) * BLOCK * shards
    spans = [(start, numel)]
    for group, owners in zip(comm.groups, comm.owners, strict=False):
        if group.rank >= owners:
            break
        numel //= owners
        start += group.rank * numel
        spans.append((start, numel))
    return spans
