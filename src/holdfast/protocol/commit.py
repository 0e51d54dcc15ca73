"""The result of a step, which the commit operation returns: equal on all ranks, bit for bit.

Each rank contributes one float64 for each lane and each flag. All ranks get the sums, added in rank order. The value of
a lane is the sum. A flag is up if all ranks raise it, a wish if any rank does. Lanes are known after the reduction of
the gradients, flags and wishes after the commit operation. To add a lane, add a field to `Commit`. To add a flag or a
wish, add a member to `Flag` or `Wish`. Logged values take another way: each rank computes them from the same notes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from holdfast.protocol.names import Struct

#: Most samples of a step, so that the sum over all steps of a job fits into a message.
MAX_SAMPLES = 1 << 40
#: most bytes of all logged names and values of a step, and most characters of a name
MAX_METRICS_BYTES = 16 << 10
MAX_METRIC_NAME = 128
#: bytes of a metric besides its name
_METRIC_BYTES = 12
MAX_METRICS = MAX_METRICS_BYTES // (_METRIC_BYTES + 1)
#: Where steps are counted by their size, each of this many bytes of metrics counts as one more step.
_WEIGHT_BYTES = 256

#: most characters of the reason of a skipped micro-batch, and of all reasons of a step
MAX_REASON = 200
MAX_REASONS = 4096

MetricName = Annotated[str, Meta(min_length=1, max_length=MAX_METRIC_NAME)]
Metrics = Annotated[dict[MetricName, float], Meta(max_length=MAX_METRICS)]


class Flag(StrEnum):
    """An action at a step boundary that all ranks take together, or none."""

    #: swap to the pending group
    SWAP = "swap"


class Wish(StrEnum):
    """A request of one rank that all ranks carry out after they have applied the step."""

    #: leave the loop
    STOP = "stop"
    #: write a checkpoint
    SAVE = "save"
    #: write a checkpoint, unless the one before is still being written
    SAVE_IF_FREE = "save_if_free"
    #: write no checkpoint that is only due, because the one before is still being written
    STILL_SAVING = "still_saving"


class MicroBatchSkip(Struct, frozen=True, kw_only=True, tag="MicroBatchSkip"):
    """A micro-batch that the script has skipped."""

    micro_batch: Annotated[int, Meta(ge=0)]
    reason: Annotated[str, Meta(max_length=MAX_REASON)]


class Commit(Struct, frozen=True, kw_only=True, tag="Commit"):
    """The result of a step, or the contribution of one rank to it."""

    #: squared norm of the reduced gradients before clipping; the contribution of a rank is that of its shard
    grad_square: float
    #: sum over all samples
    loss_sum: float
    #: number of samples that were computed or skipped
    samples: Annotated[int, Meta(ge=-1, le=MAX_SAMPLES)]
    #: number of gradient elements that are not finite
    nonfinite: int
    #: sum of the hashes of all micro-batches in the gradients (step_samples), or -1 if unknown
    sample_hashes: int = 0
    #: the same sum over the other local ranks of replica groups, each with its own hashes
    place_hashes: int = 0
    #: number of samples that the script has skipped (`step.skip`)
    skipped_samples: int = 0
    #: flags that all ranks raised, or that this rank raises
    flags: tuple[Flag, ...] = ()
    #: wishes that any rank raised, or that this rank raises
    wishes: tuple[Wish, ...] = ()
    #: logged values by name, sorted by name; may be NaN or infinite
    metrics: Metrics = msgspec.field(default_factory=dict[str, float])
    #: The loss scale was too large for this step, and is lowered. Each rank computes this itself.
    overflow: bool = False
    #: roles with workers that differ in settings or state (`fingerprint`); no worker votes for such a step
    unequal_roles: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    #: skipped micro-batches with their reasons, as many as fit
    skips: tuple[MicroBatchSkip, ...] = ()

    @property
    def trained_samples(self) -> int:
        """Number of samples in the mean of the gradients."""
        return self.samples - self.skipped_samples

    @property
    def skipped(self) -> bool:
        """Whether the optimizers leave the model alone in this step."""
        return self.nonfinite > 0 or 0 < self.samples == self.skipped_samples

    @property
    def failed(self) -> bool:
        """Whether the step was skipped, and not to lower a loss scale. `--max-skipped-steps` counts these."""
        return self.skipped and not self.overflow

    @property
    def why_skipped(self) -> str:
        """Why a skipped step changed no parameter, in words."""
        if not self.nonfinite:
            return "the script has skipped all of its micro-batches"
        loss = "" if math.isfinite(self.mean_loss) else f"; the loss is {self.mean_loss:g}"
        return f"{self.nonfinite} elements of the gradients are NaN or infinite{loss}"

    @property
    def mean_loss(self) -> float:
        """The mean over the samples that were not skipped, or NaN without any."""
        return self.loss_sum / self.trained_samples if self.trained_samples else math.nan


def describe_too_many_skipped(in_a_row: int, step: int) -> str:
    """Return why a job fails if its newest steps, up to `step`, were all skipped."""
    return (
        f"{in_a_row} steps in a row were skipped because their gradients are NaN or infinite, or because the script "
        f"skipped all of their micro-batches; the last good step is {step - in_a_row}: check the learning rate, and "
        "the data of the steps after it"
    )


#: fields of `Commit` that are not lanes
_NO_LANES = ("flags", "wishes", "metrics", "overflow", "unequal_roles", "skips")
#: The lanes and their types, in the order on the wire. Whole numbers are exact up to 2**53.
LANES: tuple[tuple[str, type[float] | type[int]], ...] = tuple(
    (name, get_type_hints(Commit)[name]) for name in Commit.__struct_fields__ if name not in _NO_LANES
)
_FLAGS, _WISHES = tuple(Flag), tuple(Wish)
#: Returns the values of all lanes of a commit.
lanes_of: Callable[[Commit], tuple[float | int, ...]] = attrgetter(*(name for name, _ in LANES))


def lane_contribution(part: Commit) -> list[float]:
    """Return the contribution of a rank to the sums of the lanes."""
    return [*map(float, lanes_of(part))]


def commit_from_sums(sums: Sequence[float]) -> Commit:
    """Return the step result without flags, from the sums over all ranks.

    Raises:
        ValueError: the number of sums is not the number of lanes.
    """
    if len(sums) != len(LANES):
        raise ValueError(f"{len(sums)} sums are not those of {len(LANES)} lanes")
    # Every step calls this, so it uses plain loops, which take microseconds.
    lanes: dict[str, Any] = {
        name: value if kind is float else _as_count(value) for (name, kind), value in zip(LANES, sums, strict=True)
    }
    return Commit(**lanes)


def flag_contribution(flags: Collection[Flag], wishes: Collection[Wish]) -> list[float]:
    """Return the contribution of a rank with these flags and wishes to the commit operation."""
    return [*[float(flag in flags) for flag in _FLAGS], *[float(wish in wishes) for wish in _WISHES]]


def with_flags(v: Commit, sums: Sequence[float], world: int) -> Commit:
    """Return the step result with the flags that all `world` ranks raised and the wishes that any rank raised.

    Raises:
        ValueError: the number of sums is not the number of flags and wishes.
    """
    if len(sums) != len(_FLAGS) + len(_WISHES):
        raise ValueError(f"{len(sums)} sums are not those of {len(_FLAGS)} flags and {len(_WISHES)} wishes")
    flags = tuple(flag for flag, raised in zip(_FLAGS, sums, strict=False) if raised == world)
    wishes = tuple(wish for wish, raised in zip(_WISHES, sums[len(_FLAGS) :], strict=True) if raised > 0)
    return msgspec.structs.replace(v, flags=flags, wishes=wishes) if flags or wishes else v


def have_same_lanes(one: Commit, other: Commit) -> bool:
    """Return whether two step results are equal in all bits except for flags and wishes."""
    # Encoded, because a NaN does not equal itself.
    bits, others = (msgspec.msgpack.encode((lane_contribution(v), v.metrics, v.skips)) for v in (one, other))
    return bits == others


def metrics_bytes(metrics: Mapping[str, float]) -> int:
    """Return the most bytes that metrics take in a message."""
    return sum(len(name.encode()) + _METRIC_BYTES for name in metrics)


def step_weight(commit: Commit) -> int:
    """Return the number of steps that a step counts as, if steps are limited by their size.

    It is 1, and one more for each 256 bytes of metrics and reasons of skipped micro-batches.
    """
    if not (commit.metrics or commit.skips):
        return 1
    reasons = sum(len(skip.reason.encode()) + _METRIC_BYTES for skip in commit.skips)
    return 1 + (metrics_bytes(commit.metrics) + reasons) // _WEIGHT_BYTES


def _as_count(value: float) -> int:
    """Return a count as an integer, or -1 for any other number, which equals no count."""
    return int(value) if value.is_integer() else -1
