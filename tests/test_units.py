"""Quantities as users write them."""

from __future__ import annotations

import pytest

from holdfast.units import parse_duration, parse_hours, parse_size, parse_work_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("500ms", 0.5),
        ("90s", 90.0),
        ("15m", 900.0),
        (" 4 h ", 14400.0),
        ("2d", 172800.0),
        ("1e-9", 1e-9),
        ("1.5e+2 ms", 0.15),
    ],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1", "4 weeks", "1h30m", "nan", "inf", "1e400", "1e400h", "1e", "e3"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "hours"), [("300", 300.0), ("90m", 1.5), ("1e-9", 1e-9), ("1e3 h", 1000.0)])
def test_hours_are_parsed(text: str, hours: float) -> None:
    assert parse_hours(text) == hours


@pytest.mark.parametrize("text", ["", "1e400", "1 week", "1e400m"])
def test_invalid_hours_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_hours(text)


@pytest.mark.parametrize(
    ("text", "seconds", "unit"),
    [
        ("0.0005/token", 5e-4, "token"),
        ("2e-6/token", 2e-6, "token"),
        (" 0.1/micro-batch ", 0.1, "micro-batch"),
        ("0", 0.0, "token"),
        ("0/token", 0.0, "token"),
    ],
)
def test_a_time_per_token_or_micro_batch_is_parsed(text: str, seconds: float, unit: str) -> None:
    found = parse_work_time(text)
    assert found == (seconds, unit)
    assert {found.of("token"), found.of("micro-batch")} == {seconds, 0.0}


@pytest.mark.parametrize(
    "text", ["", "0.1", "-1/token", "inf/token", "nan/micro-batch", "1/step", "0/", "1/token/token", "/token"]
)
def test_an_invalid_time_per_token_or_micro_batch_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a time for each token or micro-batch|could not convert"):
        parse_work_time(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("1000", 1000.0), ("200MB", 2e8), ("2 GiB", 2.0 * 1024**3), ("1.5kB", 1500.0), ("5e7", 5e7)]
)
def test_sizes_with_units_are_parsed(text: str, expected: float) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "MB", "1mb", "-1", "1e999", "2Gi", "nan"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
