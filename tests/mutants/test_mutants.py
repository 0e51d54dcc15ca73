"""Tests that all mutants fit the source and that quick ones are caught; `make mutants` runs all."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path

import pytest
from mutant import Mutant, StaleMutantError
from mutant_table import MUTANTS
from run_mutants import SOURCE, caught_by, write

CODE = '''"""An example."""

from __future__ import annotations

LIMIT = 3


class Example:
    """Counts."""

    def count(self, what: list[int]) -> int:
        """Count up to the limit."""
        total = 0
        for one in what:  # (not all)
            if one < LIMIT and total < LIMIT:
                total += one
        return finish(total=total, what=what)
'''


def mutated(old: str, new: str, qualname: str = "Example.count") -> str:
    return Mutant(name="m", module="m", qualname=qualname, old=old, new=new, why="").put_into(CODE)


def _names(code: str, *, used: bool) -> set[str]:
    """Return the names that code reads (`used`), or the ones that it binds, also as parameters or imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Name(id=name, ctx=ctx) if isinstance(ctx, ast.Load) == used:
                names.add(name)
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name) if not used:
                names.add(name)
            case ast.alias(name=name, asname=asname) if not used:
                names.add(asname or name.partition(".")[0])
            case _:
                pass
    return names


def test_every_mutant_fits_the_source() -> None:
    """The code of each mutant occurs once, and the replacement differs from it."""
    modules = {file: ast.parse((SOURCE / file).read_text()) for file in {mutant.file for mutant in MUTANTS}}
    for mutant in MUTANTS:
        mutant.find(modules[mutant.file])
        assert ast.dump(ast.parse(mutant.old)) != ast.dump(ast.parse(mutant.new)), mutant.name
        bound = _names(mutant.new, used=False) | _names((SOURCE / mutant.file).read_text(), used=False)
        unknown = _names(mutant.new, used=True) - bound - set(dir(builtins)) - {"msgspec"}  # imported if it is missing
        assert not unknown, f"{mutant.name} fails because of {unknown}, not because of its change"
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(not mutant.equivalent for mutant in MUTANTS) >= 360


def test_expressions_statements_and_arguments_are_replaced() -> None:
    assert "if one < LIMIT:" in mutated("one < LIMIT and total < LIMIT", "one < LIMIT")
    assert "total -= one" in mutated("total += one", "total -= one")
    assert "            pass\n" in mutated("if one < LIMIT and total < LIMIT:\n    total += one", "pass")
    assert "finish(total=0, what=what)" in mutated("total = total", "total = 0")
    assert "LIMIT = 4" in mutated("LIMIT = 3", "LIMIT = 4", qualname="")
    assert "\nimport msgspec\n" in mutated("total = 0", "total = msgspec.UNSET")


@pytest.mark.parametrize(
    ("old", "qualname", "times"),
    [("no_such_thing", "Example.count", 0), ("LIMIT", "Example.count", 2), ("LIMIT", "Example.other", 0)],
)
def test_a_mutant_that_does_not_fit_the_code_is_refused(old: str, qualname: str, times: int) -> None:
    with pytest.raises(StaleMutantError, match=f"'{old}' is {times} times in m:{qualname}"):
        mutated(old, "None", qualname)


def test_a_stale_mutant_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(StaleMutantError, match="is 0 times in clock:"):
        write(Mutant(name="stale", module="clock", old="no_such_thing", new="None", why=""), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_mutant_with_missing_tests_raises_an_error() -> None:
    mutant = Mutant(
        name="none",
        module="clock",
        qualname="SystemClock.time",
        old="time.time()",
        new="time.time()",
        why="",
        tests=("no.py",),
    )
    with pytest.raises(RuntimeError, match="no test has run"):
        caught_by(mutant)


def test_a_mutant_without_a_change_is_not_caught() -> None:
    none = Mutant(name="none", module="coordination.instructions", old="import msgspec", new="import msgspec", why="")
    assert caught_by(none, quick=True) == ""


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.quick], ids=lambda mutant: mutant.name)
def test_a_quick_mutant_is_caught(mutant: Mutant) -> None:
    assert caught_by(mutant, quick=True), f"{mutant.why}: not caught"
