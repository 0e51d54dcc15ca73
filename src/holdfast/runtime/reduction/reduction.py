"""Gradient reduction out of place: local sums stay intact, reduced gradients are in separate buffers.

The local sums are the tensors that autograd makes. For the reduction they are copied into flat buckets, and each bucket
is cut into one shard per rank. An all-to-all brings every rank all versions of its shard. The rank sums them in rank
order, scales and clips, and an all-gather sends the result to all ranks. Each element is summed by one rank, so all
have the same bits. Local gradients can be reused after a failure, and reduced ones can be applied later by a FORWARD
decision. If the communicator has levels, a bucket is cut level by level, within a node first (see bucket.py).

All fields of the step result are summed in float64 by a small collective after the all-to-all, which runs during the
all-gather. With clipping, its result is needed before the all-gather: each rank then scales its shard instead of all
gradients, without another pass over the memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Protocol

import torch
from msgspec.structs import replace

from holdfast.errors import BadInputError, StepUseError
from holdfast.protocol.commit import LANES, Commit, commit_from_sums, lane_contribution
from holdfast.protocol.fingerprint import find_unequal_roles
from holdfast.runtime.dtensor.local import local_of, wrap_like
from holdfast.runtime.groups.communicator import Communicator, HaltedError, PeerLostError, Pending
from holdfast.runtime.groups.sums import finish_sums, start_sums
from holdfast.runtime.reduction.bucket import Bucket, ReceiveBuffer
from holdfast.runtime.reduction.squares import DIGITS, GradientSummary, digits_to_number, sum_to_digits
from holdfast.runtime.tensors import to_floats

BUCKET_BYTES = 25 << 20
#: number of buckets in transit while another one is summed, so that the network stays busy
AHEAD = 2
#: What torch.nn.utils.clip_grad_norm_ adds to the norm.
CLIP_EPSILON = 1e-6


class Reducible(Protocol):
    """Gradients of a model, or of a part of it, that all ranks reduce shard by shard.

    Both methods raise HaltedError or PeerLostError if they are abandoned. Then the local gradients are intact, the
    reduced ones lost.
    """

    #: whether the gradients of all workers are summed, or only of workers with the same part of the model
    over_all_workers: bool

    def reduce_scatter(self, comm: Communicator, scale: float) -> GradientSummary:
        """Sum this rank's shards over all ranks, times `scale`. All ranks must call it."""
        ...

    def all_gather(self, comm: Communicator, factor: float) -> None:
        """Multiply the shards by `factor` and send them to the ranks that need them. All ranks must call it."""
        ...


#: given the number of workers, returns one worker's numbers in the compared sums (`fingerprint_contribution`)
ComparedNumbers = Callable[[int], Sequence[float]]


def compare_nothing(world: int) -> Sequence[float]:
    """Return no numbers, so that nothing is compared."""
    return ()


#: a contribution of zero to all fields of the step result except for the gradients
EMPTY_RESULT = Commit(grad_square=0.0, loss_sum=0.0, samples=0, nonfinite=0)


def reduce_gradients(
    parts: Sequence[Reducible],
    comm: Communicator,
    scale: float,
    max_norm: float | None = None,
    own: Commit = EMPTY_RESULT,
    all_workers: Communicator | None = None,
    compared: ComparedNumbers = compare_nothing,
) -> Commit:
    """Sum the gradients over all ranks, times `scale`, clip them, and compute the step result. All ranks must call it;
    the reduced gradients are then in `parts`.

    If micro-batches were skipped, gradients are scaled to means over the trained samples.

    Args:
        parts: all gradients of the job.
        comm: the group over which gradients are summed; those with `over_all_workers` are summed over `all_workers`.
        scale: 1 / (M * loss scale), with M micro-batches in the whole step.
        max_norm: clip to this norm, by the formula of torch.nn.utils.clip_grad_norm_; None for no clipping.
        own: this rank's part of the step result, except for the gradients.
        all_workers: the group over which the step result is summed; None: `comm`.
        compared: returns this rank's numbers in the compared sums, given the size of `all_workers`.

    Returns:
        The step result without flags, the same on every rank in every bit; its squared norm is the one before clipping.
        It names the roles whose compared numbers differ.

    Raises:
        HaltedError, PeerLostError: abandoned or failed. The local gradients are intact, the reduced ones lost.
    """
    world = all_workers or comm
    mine = GradientSummary.combine(
        part.reduce_scatter(world if part.over_all_workers else comm, scale) for part in parts
    )
    lanes = start_sums(world, [*_rank_sums(own, mine), *compared(world.size)], "lanes of v")
    v = None if max_norm is None else _decode_sums(finish_sums(lanes), world.size)
    factor = 1.0
    if v is not None and max_norm is not None:
        v, factor = _rescale_for_skips(v)
        norm = math.sqrt(v.grad_square) + CLIP_EPSILON
        # The norm may be NaN: then the step changes nothing.
        factor *= max_norm / norm if norm > max_norm else 1.0
    for part in parts:
        part.all_gather(world if part.over_all_workers else comm, factor)
    if v is not None:
        return v
    v, factor = _rescale_for_skips(_decode_sums(finish_sums(lanes), world.size))
    if factor != 1.0:
        # The step has skipped micro-batches, which no rank knew before: scale the shards and gather again.
        for part in parts:
            part.all_gather(world if part.over_all_workers else comm, factor)
    return v


def _rescale_for_skips(v: Commit) -> tuple[Commit, float]:
    """Return the step result `v`, and the factor that makes gradients means over the samples that were not skipped. The
    result's squared norm includes the factor, which is 1.0 if none or all were skipped.
    """
    if v.skipped_samples <= 0 or v.trained_samples <= 0:
        return v, 1.0
    factor = v.samples / v.trained_samples
    return replace(v, grad_square=v.grad_square * factor * factor), factor


def _rank_sums(own: Commit, mine: GradientSummary) -> list[float]:
    """Return this rank's numbers in the sums over all: the fields of `own`, with the gradients' part from `mine`, and
    the digits of its squared norm (zeros if that is not finite).
    """
    square = mine.square
    digits = sum_to_digits(mine.squares) if math.isfinite(square) else [0.0] * DIGITS
    return [*lane_contribution(replace(own, grad_square=square, nonfinite=mine.nonfinite)), *digits]


def _decode_sums(sums: Sequence[float], world: int) -> Commit:
    """Return the step result from the sums over all ranks: its fields, the squared norm from the digits if it is
    finite, and the roles whose compared numbers differ (none if nothing was compared).

    Args:
        sums: of the numbers of `_rank_sums`, then of the compared numbers.
        world: the number of workers.
    """
    lanes, digits, compared = sums[: len(LANES)], sums[len(LANES) :][:DIGITS], sums[len(LANES) + DIGITS :]
    v = commit_from_sums(lanes)
    if math.isfinite(v.grad_square):
        v = replace(v, grad_square=digits_to_number(digits))
    unequal = find_unequal_roles(compared, world) if compared else ()
    return replace(v, unequal_roles=unequal) if unequal else v


@contextlib.contextmanager
def reallocate_on_failure(buffers: Callable[[], None]) -> Generator[None]:
    """Return a context that calls `buffers`, to allocate new ones, if the block is abandoned: operations in abandoned
    groups may use the old ones. The error is raised again.

    Args:
        buffers: allocates the buffers.
    """
    try:
        yield
    except (HaltedError, PeerLostError):
        buffers()
        raise


def foreign_gradient_error(parameter: torch.nn.Parameter) -> StepUseError:
    """Return the error for a gradient that is not a sum of this step."""
    return StepUseError(
        f"the gradient of a parameter of shape {tuple(parameter.shape)} was made or changed outside of "
        "step.backward(loss): remove loss.backward() and zero_grad(set_to_none=False), and clip by "
        "protect(..., max_grad_norm=...)"
    )


class GradientBuckets:
    """The local and the reduced gradients of a model, independent of the world's size.

    Local gradients are the same as in plain PyTorch: autograd's own tensors, or None.
    """

    over_all_workers = False

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        counts: Callable[[torch.nn.Parameter], bool] = lambda _: True,
        device: torch.device | None = None,
    ) -> None:
        """Manage the gradients of the parameters that require one; without any, only the flag of the notes is reduced.

        Args:
            counts: returns whether a parameter counts in this worker's part of the step result, or in another role's.
            device: of the buffers if no parameter requires a gradient.

        Raises:
            BadInputError: a parameter that requires a gradient is complex.
        """
        trained = list(dict.fromkeys(parameter for parameter in parameters if parameter.requires_grad))
        for parameter in trained:
            if parameter.is_complex():
                raise BadInputError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}: gradients are reduced as "
                    "real numbers; hold its real and imaginary part in a real parameter (torch.view_as_complex)"
                )
        grouped = _group_parameters(trained, bucket_bytes, counts)
        self._buckets = [Bucket(group, counts=counts(group[0])) for group in grouped] or [Bucket((), device=device)]
        self._receive_buffers: dict[tuple[torch.dtype, torch.device, int], ReceiveBuffer] = {}
        self.hide_sums()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of these gradients."""
        return [parameter for bucket in self._buckets for parameter in bucket.parameters]

    @property
    def numel(self) -> int:
        """The number of gradient elements."""
        return sum(bucket.numel for bucket in self._buckets)

    @property
    def has_sums(self) -> bool:
        """Whether a backward of this step has made a gradient."""
        return any(gradient is not None for bucket in self._buckets for gradient in bucket.local)

    def zero(self) -> None:
        """Drop the sums, and set every `p.grad` to None, at the start of a step."""
        for bucket in self._buckets:
            bucket.local = [None] * len(bucket.parameters)
        self.hide_sums()

    @torch.no_grad()
    def collect(self) -> None:
        """Take over the gradients after a backward as sums, dense ones for sparse. If user code has reset `p.grad`, add
        the new gradient to the known sum. Every `p.grad` is then its sum, or None without one.
        """
        for bucket in self._buckets:
            for place, (parameter, known) in enumerate(zip(bucket.parameters, bucket.local, strict=True)):
                gradient = parameter.grad
                if gradient is known:
                    continue
                if known is None and gradient is not None:
                    known = bucket.local[place] = gradient.to_dense() if gradient.is_sparse else gradient
                elif known is not None and gradient is not None:
                    known.add_(gradient)
                parameter.grad = known
        self._record_versions()

    def check_gradients(self) -> bool:
        """Check that only this class has made or changed gradients. Called before each backward and each reduction.

        Returns:
            Whether `p.grad` of some sums is None, by `zero_grad()` or `hide_sums`; the sums themselves are kept.

        Raises:
            StepUseError: the script has changed gradients, so the step would not match its samples.
        """
        hidden = False
        for bucket in self._buckets:
            now = bucket.current_versions()
            if now != bucket.versions:
                changed = next(p for p, a, b in zip(bucket.parameters, now, bucket.versions, strict=True) if a != b)
                raise foreign_gradient_error(changed)
            for parameter, known in zip(bucket.parameters, bucket.local, strict=True):
                here = parameter.grad
                if here is known:
                    continue
                if here is not None:
                    raise foreign_gradient_error(parameter)
                hidden = True
        return hidden

    def show_sums(self) -> None:
        """Set every `p.grad` to its sum before a backward, so that autograd adds in place, without further memory."""
        for bucket in self._buckets:
            for parameter, known in zip(bucket.parameters, bucket.local, strict=True):
                parameter.grad = known

    def hide_sums(self) -> None:
        """Set every `p.grad` to None, so that user code cannot change the sums before the next backward."""
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        self._record_versions()

    def _record_versions(self) -> None:
        for bucket in self._buckets:
            bucket.versions = bucket.current_versions()

    def use_reduced(self) -> None:
        """Set every `p.grad` to the reduced gradient.

        A parameter without a gradient on any rank gets None, as in plain PyTorch: optimizers skip it.
        """
        for bucket in self._buckets:
            flags = to_floats(bucket.flat[bucket.numel : bucket.used - 1])
            for parameter, view, flag in zip(bucket.parameters, bucket.views, flags, strict=True):
                parameter.grad = wrap_like(view, parameter) if flag else None

    def set_has_notes(self, noted: bool) -> None:
        """Set whether the next reduction reports that this rank has notes."""
        self._buckets[0].has_notes = noted

    def any_rank_has_notes(self) -> bool:
        """Return whether any rank had notes in the last gathered reduction."""
        first = self._buckets[0]
        return bool(first.flat[first.used - 1])

    @torch.no_grad()
    def reduce_scatter(self, comm: Communicator, scale: float) -> GradientSummary:
        """Copy the local gradients into the buckets, and sum this rank's shards over all ranks, times `scale`, bucket
        by bucket and level by level. All ranks must call it.

        Returns:
            The summary of this rank's shards.

        Raises:
            HaltedError, PeerLostError: abandoned or failed. The local gradients are intact, the reduced ones lost.
        """
        shards: list[GradientSummary] = []
        levels, total = len(comm.groups), len(self._buckets)
        with reallocate_on_failure(self._allocate_buffers):
            pending: dict[int, Pending] = {}
            # Bucket b is summed on level l in round b + l. So all ranks have the same order on each level, and each
            # bucket is in transit for at least one round, while others are summed.
            for now in range(-1 - AHEAD, total + levels - 1):
                for level in range(levels - 1, -1, -1):
                    if not 0 <= (number := now - level) < total:
                        continue
                    bucket = self._buckets[number]
                    comm.groups[level].wait(pending.pop(number))
                    shards.append(bucket.sum_level(comm, level, scale))
                    if level + 1 < levels:
                        pending[number] = bucket.start_sums(comm, level + 1)
                if (number := now + 1 + AHEAD) < total:
                    bucket = self._buckets[number]
                    bucket.fill_buffer(comm, self._receive_buffer(bucket, number % (AHEAD + levels)))
                    pending[number] = bucket.start_sums(comm, 0)
        return GradientSummary.combine(shards)

    @torch.no_grad()
    def all_gather(self, comm: Communicator, factor: float) -> None:
        """Multiply this rank's shards by `factor`, and send all shards to all ranks. All ranks must call it.

        Raises:
            HaltedError, PeerLostError: abandoned or failed. The local gradients are intact, the reduced ones lost.
        """
        top = len(comm.groups) - 1
        with reallocate_on_failure(self._allocate_buffers):
            gathers: list[Pending] = []
            for bucket in self._buckets:
                if factor != 1.0:
                    bucket.scale_shard(comm, factor)
                gathers.append(bucket.start_spread(comm, top))
            for level in range(top, -1, -1):
                for number, bucket in enumerate(self._buckets):
                    comm.groups[level].wait(gathers[number])
                    if level:
                        gathers[number] = bucket.start_spread(comm, level - 1)

    def _receive_buffer(self, bucket: Bucket, number: int) -> ReceiveBuffer:
        """Return a numbered receive buffer for buckets of this kind."""
        return self._receive_buffers.setdefault((*bucket.kind, number), ReceiveBuffer(*bucket.kind))

    def _allocate_buffers(self) -> None:
        """Allocate all buffers again, because abandoned operations may still use the old ones."""
        for room in self._receive_buffers.values():
            room.allocate()
        for bucket in self._buckets:
            bucket.allocate_buffers()


def _group_parameters(
    parameters: Sequence[torch.nn.Parameter], bucket_bytes: int, counts: Callable[[torch.nn.Parameter], bool]
) -> list[list[torch.nn.Parameter]]:
    """Return groups of parameters of the same dtype and device that count in the same way; in reverse order, as
    backward makes gradients. A group is full when its local parts have `bucket_bytes` or more; the last of a kind may
    be smaller.

    Args:
        counts: returns whether a parameter counts in this worker's part of the step result.
    """
    full: list[list[torch.nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device, bool], list[torch.nn.Parameter]] = {}
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device, counts(parameter)
        group = filling.setdefault(kind, [])
        group.append(parameter)
        if sum(local_of(member).nbytes for member in group) >= bucket_bytes:
            full.append(filling.pop(kind))
    return [*full, *filling.values()]
