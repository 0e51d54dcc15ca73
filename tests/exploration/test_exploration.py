"""Exploration of planned moves: the rules in use are safe, and the exploration detects a missing rule."""

from __future__ import annotations

import pytest
from run_exploration import is_as_expected, main
from search import STUCK, UNSAFE, explore
from variants import INSTEAD, VARIANTS

#: variants that take one or two seconds each
_SHORT = (
    "joins instead | 3 steps | no faults",
    "broken: steps are announced without the owed | no faults",
    "broken: the leaver is not owed | 1 failure",
)


@pytest.mark.parametrize("name", _SHORT)
def test_short_variants_have_the_expected_verdict(name: str) -> None:
    (variant,) = (one for one in VARIANTS if one.rules.name == name)
    found = explore(variant.rules, seconds=60)
    assert is_as_expected(variant, found), found
    assert bool(found.way) != variant.is_safe


def test_states_without_a_path_to_an_end_are_detected() -> None:
    """If no state counts as an end, no state has a path to one."""
    found = explore(INSTEAD, is_end=lambda _state: False)
    assert found.verdict == STUCK
    assert found.way == ()


def test_a_violation_is_printed_with_the_shortest_path_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--way", "steps are announced without the owed"]) == 0
    output = capsys.readouterr().out
    assert UNSAFE in output
    assert "step 2 is announced, but node 1 has applied only step 1" in output
    assert "handles begin" in output


def test_variants_have_unique_names() -> None:
    names = [variant.rules.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
