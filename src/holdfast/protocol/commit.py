"""v: what the commit operation of a step returns, the same on every rank in every bit.

Every rank puts in its part, one float64 for each lane, and for each flag, and gets all parts added up in rank order. A
lane is the sum; a flag is up where every rank raised it, a wish where any did. Lanes are known once the gradients are
reduced, flags and wishes once the commit operation has returned. A further lane is one more field of Commit, a further
flag or wish one more member of Flag or Wish. What the script has logged of the step comes another way: every rank that
is READY has made it of the same notes, and puts it into its v.
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

#: of one step; so that those of all steps of a job are a number that a message can hold
MAX_SAMPLES = 1 << 40
#: of what a step may log: all names and values, and the characters of a name
MAX_METRICS_BYTES = 16 << 10
MAX_METRIC_NAME = 128
#: around a name of a metric, with its value
_METRIC_BYTES = 12
MAX_METRICS = MAX_METRICS_BYTES // (_METRIC_BYTES + 1)
#: a step whose metrics take so many bytes counts as one more, wherever steps are counted for the room that they take
_WEIGHT_BYTES = 256

#: of the reasons in v for which micro-batches were skipped: characters of each, and of all together
MAX_REASON = 200
MAX_REASONS = 4096

MetricName = Annotated[str, Meta(min_length=1, max_length=MAX_METRIC_NAME)]
Metrics = Annotated[dict[MetricName, float], Meta(max_length=MAX_METRICS)]


class Flag(StrEnum):
    """What all ranks do together at a step boundary, or none."""

    SWAP = "swap"  # armed to swap to the pending group


class Wish(StrEnum):
    """What one rank asks for, and all do once they have applied the step."""

    STOP = "stop"  # leave the loop
    SAVE = "save"  # a checkpoint
    SAVE_IF_FREE = "save_if_free"  # a checkpoint, unless the one before is still being written
    STILL_SAVING = "still_saving"  # no checkpoint that is merely due: a part of the one before is still being written


class MicroBatchSkip(Struct, frozen=True, kw_only=True, tag="MicroBatchSkip"):
    """A micro-batch that the script has left out of its step."""

    micro_batch: Annotated[int, Meta(ge=0)]
    reason: Annotated[str, Meta(max_length=MAX_REASON)]


class Commit(Struct, frozen=True, kw_only=True, tag="Commit"):
    """v, or one rank's part of it.

    `grad_square`: squared norm of the reduced gradients, before clipping; a rank's part is its shard's. `loss_sum`: of
    all samples. `samples`: how many were computed or skipped. `skipped_samples`: how many of them the script has left
    out of the step (`step.skip`). `nonfinite`: how many elements of the gradients are not finite.
    `sample_hashes`: sum of the hashes of all micro-batches whose gradients are in (step_samples); -1: not known.
    `place_hashes`: the same sum over the other places of units (layouts), where each place has hashes of its own.
    `flags`: those that every rank raised; `wishes`: those that any did; of a part, what the rank raises.
    `unequal_roles`: those whose workers differ in settings or state (`fingerprint`): no worker votes for such a step.
    `metrics`: what the script has logged, by name in alphabetical order; may be infinite or no number.
    `skips`: the micro-batches that the script has skipped, with its reasons, as far as there is room for them.
    `overflow`: the loss scale was too large for this step's gradients, and is lowered. Every rank knows it by itself.
    """

    grad_square: float
    loss_sum: float
    samples: Annotated[int, Meta(ge=-1, le=MAX_SAMPLES)]
    nonfinite: int
    sample_hashes: int = 0
    place_hashes: int = 0
    skipped_samples: int = 0
    flags: tuple[Flag, ...] = ()
    wishes: tuple[Wish, ...] = ()
    metrics: Metrics = msgspec.field(default_factory=dict[str, float])
    overflow: bool = False
    unequal_roles: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    skips: tuple[MicroBatchSkip, ...] = ()

    @property
    def trained_samples(self) -> int:
        """How many samples the gradients are the mean of."""
        return self.samples - self.skipped_samples

    @property
    def skipped(self) -> bool:
        """Whether the optimizers leave the model alone in this step."""
        return self.nonfinite > 0 or 0 < self.samples == self.skipped_samples

    @property
    def failed(self) -> bool:
        """Whether the step was skipped although no loss scale explains it. `--max-skipped-steps` counts these."""
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
        """The mean over the samples that were not skipped, NaN if there are none."""
        return self.loss_sum / self.trained_samples if self.trained_samples else math.nan


def too_many_skipped(in_a_row: int, step: int) -> str:
    """Return why a job fails whose newest steps, up to `step`, were all skipped."""
    return (
        f"{in_a_row} steps in a row were skipped because their gradients are NaN or infinite, or because the script "
        f"skipped all of their micro-batches; the last good step is {step - in_a_row}: check the learning rate, and "
        "the data of the steps after it"
    )


#: fields of a commit that are not lanes
_NO_LANES = ("flags", "wishes", "metrics", "overflow", "unequal_roles", "skips")
#: the lanes and their types (whole numbers are exact up to 2**53), in the order in which they cross the wire
LANES: tuple[tuple[str, type[float] | type[int]], ...] = tuple(
    (name, get_type_hints(Commit)[name]) for name in Commit.__struct_fields__ if name not in _NO_LANES
)
_FLAGS, _WISHES = tuple(Flag), tuple(Wish)
#: returns the values of all lanes of a commit
lanes_of: Callable[[Commit], tuple[float | int, ...]] = attrgetter(*(name for name, _ in LANES))


def lane_numbers(part: Commit) -> list[float]:
    """Return what a rank puts into the sums of the lanes."""
    return [*map(float, lanes_of(part))]


def from_lanes(sums: Sequence[float]) -> Commit:
    """Return v, without flags, from the sums of what all ranks put in.

    Raises:
        ValueError: there are more or fewer than lanes.
    """
    if len(sums) != len(LANES):
        raise ValueError(f"{len(sums)} sums are not those of {len(LANES)} lanes")
    # On every step's way: plain loops, which take microseconds.
    lanes: dict[str, Any] = {
        name: value if kind is float else _whole(value) for (name, kind), value in zip(LANES, sums, strict=True)
    }
    return Commit(**lanes)


def flag_numbers(flags: Collection[Flag], wishes: Collection[Wish]) -> list[float]:
    """Return what a rank that raises these puts into the commit operation."""
    return [*[float(flag in flags) for flag in _FLAGS], *[float(wish in wishes) for wish in _WISHES]]


def with_flags(v: Commit, sums: Sequence[float], world: int) -> Commit:
    """Return v with the flags that follow from the sums, over `world` ranks, of what each put in.

    Raises:
        ValueError: there are more or fewer than flags and wishes.
    """
    if len(sums) != len(_FLAGS) + len(_WISHES):
        raise ValueError(f"{len(sums)} sums are not those of {len(_FLAGS)} flags and {len(_WISHES)} wishes")
    flags = tuple(flag for flag, raised in zip(_FLAGS, sums, strict=False) if raised == world)
    wishes = tuple(wish for wish, raised in zip(_WISHES, sums[len(_FLAGS) :], strict=True) if raised > 0)
    return msgspec.structs.replace(v, flags=flags, wishes=wishes) if flags or wishes else v


def same_lanes(one: Commit, other: Commit) -> bool:
    """Tell whether these are v of the same attempt, whatever was raised in it: the same in every other bit."""
    # (encoded, a NaN equals itself)
    bits, others = (msgspec.msgpack.encode((lane_numbers(v), v.metrics, v.skips)) for v in (one, other))
    return bits == others


def metrics_bytes(metrics: Mapping[str, float]) -> int:
    """Return how many bytes these take of a message, at the most."""
    return sum(len(name.encode()) + _METRIC_BYTES for name in metrics)


def weight(commit: Commit) -> int:
    """Return as how many steps one with this v counts where there is room for so many: 1 for one that logs little."""
    if not (commit.metrics or commit.skips):
        return 1
    reasons = sum(len(skip.reason.encode()) + _METRIC_BYTES for skip in commit.skips)
    return 1 + (metrics_bytes(commit.metrics) + reasons) // _WEIGHT_BYTES


def _whole(value: float) -> int:
    """Return a count; -1 for what is none (infinite, no number): it equals no count, and ends no process."""
    return int(value) if value.is_integer() else -1
