"""Run benchmarks one after the other, and print their measured figures with the required limits in one table.

    python benchmarks/asked.py benchmarks/move.py "benchmarks/move_memory.py --moves 100"
    python benchmarks/asked.py --table figures.jsonl       prints the table of an earlier run

Each benchmark is started with `--figures FILE` and appends its figures to that file when it ends. A figure is judged by
its median, or by its worst value if every value must reach the limit. A figure without a limit is shown for comparison
only. The exit code is 1 if a benchmark failed, or if a figure missed its limit or was not measured.
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
    """Measured values, and the limit that they must reach."""

    name: str
    values: tuple[float, ...]
    #: The limit; None if the values are shown for comparison only.
    asked: float | None = None
    #: Whether the limit is a lower bound. Otherwise it is an upper bound.
    at_least: bool = False
    #: Whether the worst value must reach the limit instead of the median.
    each: bool = False
    #: Printed after the values ("s", "x", ...).
    unit: str = ""
    #: How the limit or the values were obtained.
    how: str = ""

    def with_limit_above(self, others: Sequence[float], more: float, what: str) -> Figure:
        """Return this figure with the median of other values plus a margin as its limit."""
        if not others:
            how = f"{what} were not measured"
            return msgspec.structs.replace(self, values=(), asked=more, how=how)
        median = statistics.median(others)
        how = f"{what} {median:.3f} + {more:g} {self.unit}"
        return msgspec.structs.replace(self, asked=median + more, how=how)

    @property
    def is_reached(self) -> bool | None:
        """Whether the values reach the limit. None without a limit, False without values."""
        if self.asked is None:
            return None
        if not self.values:
            return False
        worst = min if self.at_least else max
        counts = worst(self.values) if self.each else statistics.median(self.values)
        return counts >= self.asked if self.at_least else counts <= self.asked


def main() -> int:
    """Run the benchmarks and print the table; return 1 if any figure misses its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", help="scripts, each with its options")
    parser.add_argument("--table", type=Path, metavar="FILE", help="run nothing: print the table of these figures")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="keep the figures in this file")
    options = parser.parse_args()
    if options.table is not None:
        return print_report(read_figures(options.table), {})
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        path = options.figures or Path(folder) / "figures.jsonl"
        path.unlink(missing_ok=True)
        codes: dict[str, int] = {}
        for benchmark in options.benchmarks:
            script, *arguments = shlex.split(benchmark)
            print(f"\n---- {benchmark} ----", flush=True)
            command = [sys.executable, script, "--figures", str(path), *arguments]
            codes[Path(script).name] = subprocess.run(command, check=False).returncode
        return print_report(read_figures(path), codes)


def add_figures_option(parser: argparse.ArgumentParser) -> None:
    """Add the `--figures` option to the parser of a benchmark."""
    parser.add_argument("--figures", type=Path, metavar="FILE", help="add the figures to this file (asked.py)")


def write_figures(path: Path | None, figures: Iterable[Figure]) -> None:
    """Append figures to a file, if a path is given."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.writelines(msgspec.json.encode(figure) + b"\n" for figure in figures)


def read_figures(path: Path) -> list[Figure]:
    """Return the figures of a file, or an empty list if the file does not exist."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Figure) for line in lines]


def print_report(figures: list[Figure], codes: dict[str, int]) -> int:
    """Print the table, the missed figures and the failed benchmarks; return 1 if there are any.

    codes: exit codes by benchmark.
    """
    print("\n" + "\n".join(table_lines(figures)))
    missed = [figure.name for figure in figures if figure.is_reached is False]
    failed = [f"{name} ended with {code}" for name, code in codes.items() if code]
    print("not reached: " + ("; ".join(missed) or ("nothing" if figures else "nothing was measured")))
    if failed:
        print("; ".join(failed) + ": some of its figures may be missing above")
    return 1 if missed or failed or not figures else 0


def table_lines(figures: list[Figure]) -> list[str]:
    """Return the table's lines."""
    head = ("what", "asked", "measured: median (min..max; n)", "")
    rows = [
        head,
        *((figure.name, _format_limit(figure), _format_values(figure), _format_verdict(figure)) for figure in figures),
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(3)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, (*widths, 0), strict=True)).rstrip() for row in rows
    ]
    return [
        f"{line}   [{how}]" if how else line for line, how in zip(lines, ("", *(f.how for f in figures)), strict=True)
    ]


def _format_limit(figure: Figure) -> str:
    if figure.asked is None:
        return "-"
    sign = ">=" if figure.at_least else "<="
    return f"{'each ' if figure.each else ''}{sign} {_format_number(figure.asked)}{_format_unit(figure)}"


def _format_values(figure: Figure) -> str:
    values = figure.values
    if not values:
        return "not measured"
    middle, low, high = (_format_number(value) for value in (statistics.median(values), min(values), max(values)))
    return f"{middle}{_format_unit(figure)} ({low}..{high}; {len(values)})"


def _format_verdict(figure: Figure) -> str:
    return {None: "", True: "reached", False: "NOT REACHED"}[figure.is_reached]


def _format_unit(figure: Figure) -> str:
    return f" {figure.unit}" if figure.unit else ""


def _format_number(value: float) -> str:
    """Format with three decimals, with none from 100 on, and in exponent form below 0.0005."""
    if value and abs(value) < 5e-4:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
