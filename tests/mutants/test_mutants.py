"""The table of mutants fits the source, and those that a few schedules catch are caught; `make mutants` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutant import Mutant
from mutant_table import MUTANTS
from run_mutants import SOURCE, StaleMutantError, caught_by, write


def test_every_mutant_fits_the_source() -> None:
    """Its text is there once, so that what is tested is what the table says."""
    stale = [mutant.name for mutant in MUTANTS if (SOURCE / mutant.file).read_text().count(mutant.old) != 1]
    assert stale == []
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(not mutant.equivalent for mutant in MUTANTS) >= 40


def test_a_mutant_that_does_not_fit_fails_loudly(tmp_path: Path) -> None:
    stale = Mutant(name="stale", file="clock.py", old="no such line", new="", why="the source has changed")
    with pytest.raises(StaleMutantError, match=r"its text is 0 times in clock\.py"):
        write(stale, tmp_path)


def test_a_mutant_whose_tests_do_not_exist_is_not_caught() -> None:
    mutant = Mutant(
        name="none", file="clock.py", old="class SystemClock", new="class SystemClock", why="", tests=("no.py",)
    )
    with pytest.raises(RuntimeError, match="no test has run"):
        caught_by(mutant)


def test_without_a_mutant_nothing_is_caught() -> None:
    line = '"""What becomes of an interrupted step'
    none = Mutant(name="none", file="coordination/generations/decisions.py", old=line, new=line, why="")
    assert caught_by(none, quick=True) == ""


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.quick], ids=lambda mutant: mutant.name)
def test_a_quick_mutant_is_caught(mutant: Mutant) -> None:
    assert caught_by(mutant, quick=True), f"{mutant.why}: nobody noticed"
