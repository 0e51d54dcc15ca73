"""Runs benchmarks one after the other, and prints one table of what is asked of them beside what they have measured.

    python benchmarks/asked.py benchmarks/move.py "benchmarks/move_memory.py --moves 100"
    python benchmarks/asked.py --table figures.jsonl       of a run before

Each is started with `--figures FILE`, and adds its figures to that file as it ends. A figure counts by its median, or
by its worst value where each has to reach what is asked. What is only shown beside others has nothing asked of it.
Ends with 1 where a benchmark has, where a figure is not reached, or could not be measured.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and what is asked of it.

    asked: the limit, None where this is only shown beside others; at_least: else at most.
    each: the worst value counts, not the median. unit: behind the values ("s", "x", ...).
    how: what the limit is made of, or how the values came about.
    """

    name: str
    values: tuple[float, ...]
    asked: float | None = None
    at_least: bool = False
    each: bool = False
    unit: str = ""
    how: str = ""

    def against(self, others: Sequence[float], more: float, what: str) -> Figure:
        """Return this with what others take, by their median, and so much more as its limit."""
        if not others:
            how = f"{what} were not measured"
            return msgspec.structs.replace(self, values=(), asked=more, how=how)
        median = statistics.median(others)
        how = f"{what} {median:.3f} + {more:g} {self.unit}"
        return msgspec.structs.replace(self, asked=median + more, how=how)

    @property
    def reached(self) -> bool | None:
        """Whether the values are as they are asked for; None where nothing is asked. Nothing measured: not reached."""
        if self.asked is None:
            return None
        if not self.values:
            return False
        worst = min if self.at_least else max
        counts = worst(self.values) if self.each else statistics.median(self.values)
        return counts >= self.asked if self.at_least else counts <= self.asked


def main() -> int:
    """Run the benchmarks and print the table; 1 where anything is not as it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", help="scripts, each with its options")
    parser.add_argument("--table", type=Path, metavar="FILE", help="run nothing: print the table of these figures")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="keep the figures in this file")
    options = parser.parse_args()
    if options.table is not None:
        return report(read(options.table), {})
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        path = options.figures or Path(folder) / "figures.jsonl"
        path.unlink(missing_ok=True)
        codes: dict[str, int] = {}
        for benchmark in options.benchmarks:
            script, *arguments = shlex.split(benchmark)
            print(f"\n---- {benchmark} ----", flush=True)
            command = [sys.executable, script, "--figures", str(path), *arguments]
            codes[Path(script).name] = subprocess.run(command, check=False).returncode
        return report(read(path), codes)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Let a benchmark be told where its figures go."""
    parser.add_argument("--figures", type=Path, metavar="FILE", help="add the figures to this file (asked.py)")


def write(path: Path | None, figures: Iterable[Figure]) -> None:
    """Add figures to a file, where there is one."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.writelines(msgspec.json.encode(figure) + b"\n" for figure in figures)


def read(path: Path) -> list[Figure]:
    """Return the figures of a file; none where it is not there."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Figure) for line in lines]


def report(figures: list[Figure], codes: dict[str, int]) -> int:
    """Print the table, and what has not gone well; return 1 where anything has not. codes: exit codes by benchmark."""
    print("\n" + "\n".join(table(figures)))
    missed = [figure.name for figure in figures if figure.reached is False]
    failed = [f"{name} ended with {code}" for name, code in codes.items() if code]
    print("not reached: " + ("; ".join(missed) or ("nothing" if figures else "nothing was measured")))
    if failed:
        print("; ".join(failed) + ": what it was to measure may be missing above")
    return 1 if missed or failed or not figures else 0


def table(figures: list[Figure]) -> list[str]:
    """Return the table's lines."""
    head = ("what", "asked", "measured: median (min..max; n)", "")
    rows = [head, *((figure.name, _asked(figure), _measured(figure), _verdict(figure)) for figure in figures)]
    widths = [max(len(row[place]) for row in rows) for place in range(3)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, (*widths, 0), strict=True)).rstrip() for row in rows
    ]
    return [
        f"{line}   [{how}]" if how else line for line, how in zip(lines, ("", *(f.how for f in figures)), strict=True)
    ]


def _asked(figure: Figure) -> str:
    if figure.asked is None:
        return "-"
    sign = ">=" if figure.at_least else "<="
    return f"{'each ' if figure.each else ''}{sign} {_number(figure.asked)}{_unit(figure)}"


def _measured(figure: Figure) -> str:
    values = figure.values
    if not values:
        return "not measured"
    middle, low, high = (_number(value) for value in (statistics.median(values), min(values), max(values)))
    return f"{middle}{_unit(figure)} ({low}..{high}; {len(values)})"


def _verdict(figure: Figure) -> str:
    return {None: "", True: "reached", False: "NOT REACHED"}[figure.reached]


def _unit(figure: Figure) -> str:
    return f" {figure.unit}" if figure.unit else ""


def _number(value: float) -> str:
    """Return three decimals, fewer of large numbers; very small ones by their powers of ten."""
    if value and abs(value) < 5e-4:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
