"""Tests that the gallery's scripts need few more lines than plain ones, and compute the same on one worker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from places import BENCHMARKS, EXAMPLES, ROOT
from warm_start import run_warm

GALLERY = EXAMPLES / "gallery"
NAMES = sorted(path.stem.removesuffix("_plain") for path in GALLERY.glob("*_plain.py"))
#: importing a transformers model or compiling takes ten times longer than the rest, so `make bench-gallery` runs them
SLOW = {"llama", "mixtral", "compiled"}
#: Relative error. A plain script divides the loss before backward, holdfast the gradients after it. That rounds
#: differently in float16, which has fewer digits for small numbers, depending on the processor's instructions.
ROUNDING = {"fp16": 1e-5}


def test_every_script_needs_at_most_fifteen_changed_lines(warm_torch: str) -> None:
    done = run_warm(warm_torch, GALLERY / "changed_lines.py")
    rows = {row[0]: row[1:] for row in map(str.split, done.stdout.splitlines()[1:])}
    assert sorted(rows) == NAMES
    assert {name: row for name, row in rows.items() if int(row[3]) > 15} == {}
    page = (ROOT / "docs" / "gallery.md").read_text()
    told = {
        name: said.split(" | ") for name, said in re.findall(r"^\| `(\w+)` \| (\d+ \| \d+ \| \d+)", page, re.MULTILINE)
    }
    assert told == {name: row[:3] for name, row in rows.items()}, "docs/gallery.md"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SLOW])
def test_a_script_on_one_worker_computes_the_same_as_its_plain_version(
    name: str, warm_torch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain twin receives its samples in holdfast's order."""
    monkeypatch.chdir(tmp_path)
    plain = run_warm(warm_torch, BENCHMARKS / "in_order.py", str(GALLERY / f"{name}_plain.py"), "--steps", "3")
    alone = run_warm(warm_torch, GALLERY / f"{name}.py", "--steps", "3")
    assert (plain.returncode, alone.returncode) == (0, 0), plain.stderr + alone.stderr
    assert _numbers(alone.stdout) == pytest.approx(_numbers(plain.stdout), rel=ROUNDING.get(name, 1e-6))
    assert len(_numbers(alone.stdout)) >= 3


def _numbers(printed: str) -> list[float]:
    """Return the numbers that a script has printed for each step and for its trained model."""
    return [float(line.split()[-1]) for line in printed.splitlines()]
