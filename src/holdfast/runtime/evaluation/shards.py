"""One evaluation of a script: its data in shards, a shard's result, and the combined result."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, cast

import msgspec
import numpy as np
import torch

from holdfast.errors import BadInputError
from holdfast.protocol.commit import MAX_METRICS_BYTES, metrics_bytes
from holdfast.protocol.names import NAME_PATTERN
from holdfast.runtime.checkpoints.best import BestChoice
from holdfast.runtime.data.datasets import SampleFetcher
from holdfast.runtime.data.torch_loader import is_stream
from holdfast.runtime.gradients.logged_values import check_name, to_number
from holdfast.runtime.options import format_value
from holdfast.runtime.tensors import is_unbatched_collate

#: the script's function: returns means over a batch's samples, by name
Measure = Callable[[Any], Mapping[str, "torch.Tensor | float"]]


class ShardResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of one shard: its number of samples, and the means over them."""

    samples: int
    means: dict[str, float]


class ModelEvaluation:
    """An evaluation: the function, the data, and how often it runs."""

    def __init__(
        self, measure: Measure, data: Any, *, every: int, name: str, micro_batch: int, choice: BestChoice
    ) -> None:
        """Check the arguments, and split the data into shards of one batch each.

        Args:
            measure: the script's function.
            data: a map-style data set, in batches of `micro_batch`; or a DataLoader of one, with its own batch size.
            every: steps between two evaluations.
            choice: which states are kept as the best.

        Raises:
            BadInputError: an argument is not valid, or the data set has no length or no samples.
        """
        where = f"job.evaluate(name={format_value(name)})"
        if not isinstance(cast(object, name), str) or not re.fullmatch(NAME_PATTERN, name):
            raise BadInputError(
                f"{where}: a name has up to 64 letters, digits, '.', '_' and '-', and starts with a letter or digit"
            )
        if not callable(cast(object, measure)):
            raise BadInputError(f"{where}: the function is a {type(measure).__name__}: give a function of a batch")
        for option, number, least in (("every", every, 1), ("save_top_k", choice.keep, 0)):
            if not isinstance(cast(object, number), int) or number < least:
                raise BadInputError(f"{where}: {option} is {number!r}: it must be a whole number, at least {least}")
        if choice.mode not in ("min", "max"):
            raise BadInputError(f"{where}: mode is {choice.mode!r}: it must be min or max")
        dataset, collate, batch = data, None, micro_batch
        if hasattr(data, "dataset") and hasattr(data, "collate_fn"):
            dataset, collate = data.dataset, None if is_unbatched_collate(data.collate_fn) else data.collate_fn
            batch = getattr(data, "batch_size", None) or micro_batch
        if is_stream(dataset) or not hasattr(dataset, "__len__"):
            raise BadInputError(
                f"{where}: the data set is a {type(dataset).__name__}: it needs __len__ and __getitem__, so that each "
                "sample counts exactly once"
            )
        if len(dataset) < 1:
            raise BadInputError(f"{where}: the data set is empty: it needs at least one sample")
        self.measure, self.name, self.every, self.choice = measure, name, every, choice
        self.samples, self.batch = len(dataset), batch
        self._fetch = SampleFetcher(dataset, collate)

    @property
    def shards(self) -> int:
        """The number of shards."""
        return -(-self.samples // self.batch)

    @property
    def settings(self) -> tuple[str, int, int, int]:
        """The settings that must be equal on all workers: name, every, samples, batch size."""
        return self.name, self.every, self.samples, self.batch

    def indices(self, shard: int) -> list[int]:
        """Return the indices of a shard's samples; the last shard may have fewer."""
        return list(range(shard * self.batch, min((shard + 1) * self.batch, self.samples)))

    def fetch(self, step: int, shard: int) -> Any:
        """Return a shard's batch, on the host."""
        return self._fetch(step, shard, self.indices(shard))

    def make_result(self, shard: int, found: object) -> ShardResult:
        """Convert the script's result for a shard to numbers, with the number of samples of the shard.

        Raises:
            BadInputError: it is not a mapping of names to numbers, or it has too many names for the job's events.
        """
        where = f"the function of job.evaluate(name={self.name!r})"
        if not isinstance(found, Mapping):
            raise BadInputError(
                f"{where} returned a {type(found).__name__}: it must return means by name, such as "
                '{"loss": loss.item()}'
            )
        means: dict[str, float] = {}
        for name, value in cast(Mapping[str, object], found).items():
            check_name(where, f"{self.name}/{name}" if isinstance(cast(object, name), str) else name)
            means[name] = float(to_number(where, name, value))
        if metrics_bytes({f"{self.name}/{name}": 0.0 for name in means}) > MAX_METRICS_BYTES // 2:
            raise BadInputError(
                f"{where} returned {len(means)} values: with their names they may have {MAX_METRICS_BYTES // 2} bytes; "
                "return fewer values, or shorten their names"
            )
        return ShardResult(len(self.indices(shard)), means)

    def combine(self, results: Sequence[ShardResult]) -> dict[str, float]:
        """Return the means over all samples: shard by shard, in order, weighted by their samples.

        Args:
            results: of all shards, in order.

        Raises:
            BadInputError: shards have different names, or the value that decides about the best states is missing.
        """
        names = sorted(results[0].means)
        for number, result in enumerate(results):
            if sorted(result.means) != names:
                raise BadInputError(
                    f"the function of job.evaluate(name={self.name!r}) returned {names} for shard 0 and "
                    f"{sorted(result.means)} for shard {number}: it must return the same names for every batch"
                )
        if self.choice.keep and self.choice.monitor not in names:
            raise BadInputError(
                f"job.evaluate(name={self.name!r}, monitor={self.choice.monitor!r}): its function returns {names}: "
                "monitor one of them"
            )
        found: dict[str, float] = {}
        for name in names:
            total = 0.0
            for result in results:
                total += result.samples * result.means[name]
            found[name] = total / self.samples
        return found


def pack_shards(shards: Mapping[int, ShardResult], count: int) -> bytes:
    """Return the set of these shards as packed bits, one bit for each of `count` shards, padded to whole bytes."""
    bits = np.zeros(count, dtype=np.bool_)
    bits[list(shards)] = True
    return np.packbits(bits).tobytes()


def intersect_bits(bits: Sequence[bytes]) -> bytes:
    """Return the bits that are set in all of these."""
    return reduce(lambda all_of, one: bytes(a & b for a, b in zip(all_of, one, strict=True)), bits)


def find_first_holders(bits: Sequence[bytes], count: int) -> list[int | None]:
    """Return, for each of `count` shards, the first rank that has it, or None.

    Args:
        bits: the shards of each rank, as from `pack_shards`.
    """
    found: list[int | None] = [None] * count
    for rank in range(len(bits) - 1, -1, -1):
        present = np.unpackbits(np.frombuffer(bits[rank], dtype=np.uint8), count=count)
        for shard in np.flatnonzero(present):
            found[int(shard)] = rank
    return found
