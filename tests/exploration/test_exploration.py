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
def test_short_variants_are_as_they_must_be(name: str) -> None:
    (variant,) = (one for one in VARIANTS if one.rules.name == name)
    found = explore(variant.rules, seconds=60)
    assert is_as_expected(variant, found), found
    assert bool(found.way) != variant.is_safe


def test_what_never_ends_is_found() -> None:
    """If no state counts as an end, no state has a path to one."""
    found = explore(INSTEAD, is_end=lambda _state: False)
    assert found.verdict == STUCK
    assert found.way == ()


def test_what_was_found_is_shown_with_the_shortest_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--way", "steps are announced without the owed"]) == 0
    output = capsys.readouterr().out
    assert UNSAFE in output
    assert "step 2 is announced, but node 1 has applied only step 1" in output
    assert "handles begin" in output


def test_variants_have_names_of_their_own() -> None:
    names = [variant.rules.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
