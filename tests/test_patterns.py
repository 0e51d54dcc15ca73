"""Properties of a regular expression before its use: whether it may take forever, and its fixed prefix."""

from __future__ import annotations

import re

import pytest

from holdfast.patterns import can_match_beginning, choose_searched_length, explain_slowness

BEGINNINGS = ("hang: ", "exception: ")


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|aa)+$",
        "(a?){30}a{30}",
        r"(\w+\s*)+:",
        "([^,]*,)*x",
        "(?:a{1,15}){1,15}b",
        "a?" * 30 + "a{30}",
        "(?=(a+)+b)",
        r"(a*)*",
        r"(a|b)*\1+(?:\1|c)*",
    ],
)
def test_patterns_with_unbounded_matching_time_are_detected(pattern: str) -> None:
    assert explain_slowness(pattern)


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        ("(?:foo|bar)+x", 8192),
        (r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}", 8192),
        (r"node-\d+: .*failed", 8192),
        (r"fan (\d+) .* failed.*slot (\d+)", 1216),
        (r"(?:\S+ ){3}x", 291),
        (r".*a.*b.*c", 291),
        ("x.*", 8192),
    ],
)
def test_searched_text_is_limited_by_the_cost_of_the_pattern(pattern: str, length: int) -> None:
    assert not explain_slowness(pattern)
    assert choose_searched_length(pattern, 8192) == length
    assert choose_searched_length(pattern, 100) == 100
    hard = "foobar fan 1 aab failed 1.2.3 node-12: ab ab " * 200
    assert not re.compile(f"{pattern}!").search(hard, 0, choose_searched_length(f"{pattern}!", 8192))


@pytest.mark.parametrize(
    ("pattern", "may"),
    [
        ("^hang$", False),
        ("^(?:hang|exception)$", False),
        (r"\Ahang\Z", False),
        ("^fan", False),
        ("^$", False),
        ("^hang", True),
        ("^hang: late$", True),
        (r"^hang\b", True),
        ("hang$", True),
        ("^fan|disk", True),
        ("(?m)^fan", True),
        ("^(HANG|exception): .*x", True),
        ("^.*x", True),
    ],
)
def test_patterns_that_cannot_match_given_beginnings_are_detected(pattern: str, *, may: bool) -> None:
    assert can_match_beginning(pattern, BEGINNINGS) == may
