"""The exploration of planned moves itself: what is built is safe, and rules that are left out are missed."""

from __future__ import annotations

import pytest
from run_exploration import is_as_expected, main
from search import STUCK, UNSAFE, explore
from variants import INSTEAD, VARIANTS

#: explored in a second or two each
_SHORT = (
    "joins instead, by the Stop | no faults",
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
    """An end that is not counted as one leaves every state without a way on."""
    found = explore(INSTEAD, is_end=lambda _state: False)
    assert found.verdict == STUCK
    assert found.way == ()


def test_what_was_found_is_shown_with_the_shortest_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--way", "steps are announced without the owed"]) == 0
    said = capsys.readouterr().out
    assert UNSAFE in said
    assert "step 2 is announced, node 1 stands at 1" in said
    assert "takes begin" in said


def test_variants_have_names_of_their_own() -> None:
    names = [variant.rules.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
