"""Count the lines that differ between each resilient script of the gallery and its plain version.

    python examples/gallery/changed_lines.py [--show NAME]

Lines are compared with difflib. Imports, comments and docstrings count, empty lines do not. The number of changed lines
is the larger of removed and added lines, so a replaced line counts once.
"""

from __future__ import annotations

import argparse
import difflib
from dataclasses import dataclass
from pathlib import Path

GALLERY = Path(__file__).resolve().parent
PLAIN = "_plain"
MAX_CHANGED = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The difference between a script and its plain version."""

    name: str
    shows: str
    #: Lines of the plain script.
    lines: int
    #: Lines that only the plain script has.
    removed: int
    #: Lines that only the resilient script has.
    added: int

    @property
    def changed(self) -> int:
        """The number of changed lines."""
        return max(self.removed, self.added)


def main() -> None:
    """Print the table, or one pair's difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", choices=names(), help="print the difference of this pair")
    shown = parser.parse_args().show
    if shown is not None:
        print("\n".join(difflib.unified_diff(*_lines(shown), f"{shown}{PLAIN}.py", f"{shown}.py", lineterm="")))
        return
    print(f"{'script':26s} lines  removed  added  changed")
    for each in map(change_of, names()):
        print(f"{each.name:26s} {each.lines:5d}  {each.removed:7d}  {each.added:5d}  {each.changed:7d}  {each.shows}")


def names() -> list[str]:
    """Return the names of all pairs."""
    return sorted(path.stem.removesuffix(PLAIN) for path in GALLERY.glob(f"*{PLAIN}.py"))


def change_of(name: str) -> Change:
    """Compare a plain script with its resilient version."""
    plain, twin = _lines(name)
    marks = [line[0] for line in difflib.ndiff(_filled(plain), _filled(twin))]
    return Change(
        name=name,
        shows=plain[0].strip('"'),
        lines=len(_filled(plain)),
        removed=marks.count("-"),
        added=marks.count("+"),
    )


def _filled(lines: list[str]) -> list[str]:
    return [line for line in lines if line.strip()]


def _lines(name: str) -> tuple[list[str], list[str]]:
    plain, twin = GALLERY / f"{name}{PLAIN}.py", GALLERY / f"{name}.py"
    return plain.read_text().splitlines(), twin.read_text().splitlines()


if __name__ == "__main__":
    main()
