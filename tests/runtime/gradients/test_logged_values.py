"""Logged values of a step: one number per name, reduced in the order of the notes; other values are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import BadInputError
from holdfast.protocol.commit import MAX_METRICS_BYTES
from holdfast.runtime.gradients.logged_values import LoggedValues


def note(values: Mapping[str, Any], reduce: str = "mean") -> bytes:
    """Return the note of a micro-batch that logged these values."""
    logged = LoggedValues()
    logged.on_micro_batch_start(1, 0)
    logged.log(values, reduce)
    return logged.make_note()


def own(values: Mapping[str, Any], reduce: str = "mean") -> bytes:
    """Return the note of a rank that logged these values outside the loop."""
    logged = LoggedValues()
    logged.log(values, reduce)
    return logged.make_rank_note()


def taken(notes: list[bytes], of_ranks: list[bytes]) -> dict[str, float]:
    logged = LoggedValues()
    logged.merge(notes, of_ranks)
    return logged.metrics


@pytest.mark.parametrize(("reduce", "expected"), [("mean", 2.0), ("sum", 6.0), ("min", 0.5), ("max", 4.0)])
def test_logged_values_are_reduced_over_the_micro_batches_that_log_them(reduce: str, expected: float) -> None:
    notes = [note({"a": value}, reduce) for value in (1.5, 4.0, 0.5)]
    assert taken([notes[0], b"", *notes[1:]], [b""]) == {"a": expected}


def test_the_mean_of_equal_values_is_exact() -> None:
    """0.1 + 0.1 + 0.1 divided by 3 is not 0.1."""
    value = 0.1
    assert sum([value] * 3) / 3 != value
    assert taken([note({"rate": value})] * 3, [own({"other": value})] * 3) == {"other": value, "rate": value}


def test_metrics_are_in_alphabetical_order() -> None:
    assert list(taken([note({"b": 1, "a": 2}), note({"c": 1})], [own({"ab": 1})])) == ["a", "ab", "b", "c"]


@pytest.mark.parametrize("reduce", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("place", [0, 1])
def test_nan_and_infinity_are_kept_by_every_reduction(reduce: str, place: int) -> None:
    values = [1.0, 1.0]
    values[place] = math.nan
    assert math.isnan(taken([note({"a": value}, reduce) for value in values], [b""])["a"])
    assert taken([note({"a": math.inf}, reduce)], [b""]) == {"a": math.inf}


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float32(2), np.int64(2), torch.tensor(2), torch.tensor([2.0], requires_grad=True), torch.ones(1) * 2],
)
def test_numbers_of_all_types_can_be_logged(value: Any) -> None:
    assert taken([note({"a": value})], [b""]) == {"a": 2.0}
    assert taken([note({"a": True})], [b""]) == {"a": 1.0}


def test_a_logged_tensor_is_read_when_it_is_logged() -> None:
    value, logged = torch.tensor(1.0), LoggedValues()
    logged.on_micro_batch_start(1, 0)
    logged.log({"a": value}, "mean")
    value.fill_(9.0)
    assert taken([logged.make_note()], [b""]) == {"a": 1.0}


def test_the_last_value_of_a_micro_batch_is_used_in_the_current_attempt() -> None:
    logged = LoggedValues()
    logged.log({"own": 1.0}, "mean")
    logged.on_micro_batch_start(1, 0)
    logged.log({"a": 1.0}, "mean")
    logged.on_attempt_start()
    assert logged.make_rank_note() == b""
    logged.on_micro_batch_start(1, 0)
    assert logged.make_note() == b""
    logged.on_micro_batch_start(1, 1)
    logged.log({"a": 2.0, "b": 1.0}, "mean")
    logged.log({"a": 3.0}, "mean")
    logged.merge([logged.make_note()], [logged.make_rank_note()])
    assert logged.metrics == {"a": 3.0, "b": 1.0}


@pytest.mark.parametrize(
    ("values", "reduce", "why"),
    [
        ({1: 2.0}, "mean", "1 is not a name"),
        ({"": 2.0}, "mean", "'' is not a name"),
        ({"a\ud800": 2.0}, "mean", r"'a\\ud800' is not a name"),
        ({"a": 10**400}, "mean", "the value of 'a' is too large for a float"),
        ({"a" * 129: 2.0}, "mean", "of 1 to 128 characters"),
        ({"a": "2"}, "mean", "the value of 'a' is a str: give a number"),
        ({"a": None}, "mean", "is a NoneType"),
        ({"a": 1j}, "mean", "is a complex"),
        ({"a": torch.ones(2)}, "mean", r"a tensor of \(2,\), torch.float32: one real number"),
        ({"a": torch.tensor(1j)}, "mean", "complex64"),
        ({"a": 1.0}, "median", "reduce='median'.*: it must be one of mean, sum, min, max"),
        ([("a", 1.0)], "mean", "needs a mapping .* not a list"),
        ({f"{number:100}": 1.0 for number in range(200)}, "mean", f"a step may log {MAX_METRICS_BYTES}: log fewer"),
    ],
)
def test_invalid_log_values_are_refused(values: Any, reduce: str, why: str) -> None:
    with pytest.raises(BadInputError, match=why):
        LoggedValues().log(values, reduce)


def test_a_metric_name_cannot_be_logged_in_two_ways() -> None:
    logged = LoggedValues()
    logged.log({"a": 1.0}, "mean")
    with pytest.raises(BadInputError, match="'a' is reduced by sum here and by mean elsewhere"):
        logged.log({"a": 1.0}, "sum")
    with pytest.raises(BadInputError, match="'a' is logged inside the loop over the micro-batches and outside"):
        taken([note({"a": 1.0})], [own({"a": 1.0})])


def test_the_values_logged_by_all_ranks_together_are_bounded() -> None:
    each = [own({f"{rank}/{number:100}": 1.0 for number in range(100)}) for rank in range(2)]
    with pytest.raises(BadInputError, match=f"a step may log {MAX_METRICS_BYTES}"):
        taken([b""], each)
