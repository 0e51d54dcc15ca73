"""Values that a script logs in a step: per micro-batch or per rank, reduced to one number each by every rank."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import cast

import msgspec
import torch

from holdfast.errors import BadInputError
from holdfast.protocol.commit import MAX_METRIC_NAME, MAX_METRICS_BYTES, metrics_bytes
from holdfast.runtime.micro_batch_notes import NoteSource
from holdfast.runtime.options import format_value


def _mean(values: Sequence[float]) -> float:
    # If all values are the same, the mean is exact in every bit.
    return values[0] if all(value == values[0] for value in values) else sum(values) / len(values)


def _minimum(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values)


def _maximum(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": _mean,
    "sum": sum,
    "min": _minimum,
    "max": _maximum,
}
#: reduction and value of each name
_NoteValues = dict[str, tuple[str, float]]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_NoteValues)


class LoggedValues(NoteSource):
    """The values that the script logs in an attempt at a step, and the results over all ranks."""

    def __init__(self) -> None:
        """Start without values."""
        #: results of the last step, by name, in alphabetical order
        self.metrics: dict[str, float] = {}
        #: values of job.evaluate(), which are added to `metrics`: the same on all ranks
        self.evaluation_metrics: dict[str, float] = {}
        #: values of the present micro-batch, or None outside of the loop over micro-batches
        self._inside: dict[str, tuple[str, float | torch.Tensor]] | None = None
        #: values of this rank, logged outside of that loop
        self._outside: dict[str, tuple[str, float | torch.Tensor]] = {}
        self._reductions: dict[str, str] = {}

    def log(self, values: Mapping[str, float | torch.Tensor], reduce: str) -> None:
        """Keep values for the micro-batch in progress, or for this rank if none is in progress. A name that was logged
        there before is overwritten.

        Args:
            reduce: how the values of all micro-batches, or ranks, become one number: "mean", "sum", "min" or "max".

        Raises:
            BadInputError: a name, a value or `reduce` is invalid, `reduce` differs from an earlier call, or the values
                exceed the limit of a step.
        """
        if reduce not in _REDUCTIONS:
            raise BadInputError(f"step.log(..., reduce={reduce!r}): it must be one of {', '.join(_REDUCTIONS)}")
        given = cast(object, values)
        if not isinstance(given, Mapping):
            raise BadInputError(f"step.log() needs a mapping of names to numbers, not a {type(given).__name__}")
        here = self._outside if self._inside is None else self._inside
        for name, value in values.items():
            check_name("step.log()", name)
            if self._reductions.setdefault(name, reduce) != reduce:
                raise BadInputError(
                    f"step.log(): {name!r} is reduced by {reduce} here and by {self._reductions[name]} elsewhere: give "
                    "one of them another name"
                )
            here[name] = (reduce, to_number("step.log()", name, value))
        _check_size(dict.fromkeys((*self._outside, *here), 0.0))

    def on_attempt_start(self) -> None:
        """Discard the values that this rank logged outside of the loop over micro-batches, and of an unfinished
        micro-batch.
        """
        self._inside = None
        self._outside = {}

    def on_micro_batch_start(self, step: int, micro_batch: int) -> None:
        self._inside = {}

    def make_note(self) -> bytes:
        """Return the micro-batch's values, encoded, or b"" if it has none. Later values count for the rank."""
        inside, self._inside = self._inside, None
        return _encode_values(inside or {})

    def make_rank_note(self) -> bytes:
        return _encode_values(self._outside)

    def merge(self, notes: Sequence[bytes], of_ranks: Sequence[bytes]) -> None:
        """Reduce the values of each name over all notes to one number. Keep these and the values of job.evaluate() as
        `metrics`, sorted by name.

        Raises:
            BadInputError: a name was logged both inside and outside of the loop over micro-batches, or is one of
                job.evaluate()'s; or the values exceed the limit of a step.
        """
        inside, outside = _values_by_name(notes), _values_by_name(of_ranks)
        if both := sorted(inside.keys() & outside.keys()):
            raise BadInputError(
                f"step.log(): {both[0]!r} is logged inside the loop over the micro-batches and outside of it: give one "
                "of them another name"
            )
        columns = inside | outside
        if both := sorted(columns.keys() & self.evaluation_metrics.keys()):
            raise BadInputError(f"step.log(): {both[0]!r} is a value of job.evaluate(): give one of them another name")
        found = {
            name: _REDUCTIONS[reduce](values) for name, (reduce, values) in columns.items()
        } | self.evaluation_metrics
        self.metrics = dict(sorted(found.items()))
        _check_size(self.metrics)


def _encode_values(values: Mapping[str, tuple[str, float | torch.Tensor]]) -> bytes:
    """Return names, reductions and values as MessagePack, or b"" without values. Waits for values on a device."""
    if not values:
        return b""
    return _encoder.encode({name: (reduce, float(value)) for name, (reduce, value) in values.items()})


def _values_by_name(notes: Sequence[bytes]) -> dict[str, tuple[str, list[float]]]:
    """Return all values of each name, in order, with its reduction ("mean", "sum", "min" or "max"), which the first one
    determines.

    Args:
        notes: the encoded values of each micro-batch or rank; empty ones are left out.
    """
    columns: dict[str, tuple[str, list[float]]] = {}
    for note in notes:
        values = _decoder.decode(note) if note else {}
        for name, (reduce, value) in values.items():
            columns.setdefault(name, (reduce, []))[1].append(value)
    return columns


def check_name(where: str, name: object) -> None:
    """Check that a value's name is a string of 1 to `MAX_METRIC_NAME` characters that can be encoded as UTF-8.

    Raises:
        BadInputError: it is not a valid name; the message starts with `where`.
    """
    # A lone surrogate cannot be encoded as UTF-8.
    if not isinstance(name, str) or not 0 < len(name) <= MAX_METRIC_NAME or re.search("[\ud800-\udfff]", name):
        raise BadInputError(
            f"{where}: {format_value(name)} is not a name: a string of 1 to {MAX_METRIC_NAME} characters is needed"
        )


def to_number(where: str, name: str, value: object) -> float | torch.Tensor:
    """Return a real number, or a tensor with one element, as a float. A tensor on a device is returned as a copy there,
    to be read later, so that the script need not wait.

    Raises:
        BadInputError: it is not a number; the message starts with `where`.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            kind = f"a tensor of {tuple(value.shape)}, {value.dtype}"
            raise BadInputError(
                f"{where}: the value of {name!r} is {kind}: one real number is needed, such as its mean()"
            )
        # A value on a device is read at the end of the micro-batch, so that the script can go on issuing work.
        return float(value.detach()) if value.device.type == "cpu" else value.detach().clone()
    if isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:
            raise BadInputError(f"{where}: the value of {name!r} is too large for a float: log its logarithm") from None
    raise BadInputError(
        f"{where}: the value of {name!r} is a {type(value).__name__}: give a number, or a tensor of one element"
    )


def _check_size(metrics: Mapping[str, float]) -> None:
    """Check that a step's values, encoded with their names, do not exceed `MAX_METRICS_BYTES`.

    Raises:
        BadInputError: they do.
    """
    size = metrics_bytes(metrics)
    if size > MAX_METRICS_BYTES:
        raise BadInputError(
            f"step.log(): {len(metrics)} values take {size} bytes with their names, and a step may log "
            f"{MAX_METRICS_BYTES}: log fewer of them, or under shorter names, and write the rest to a file of your own"
        )
