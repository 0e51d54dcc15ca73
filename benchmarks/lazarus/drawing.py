"""Functions that draw the figures. matplotlib is imported only when a figure is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import BadInputError

OURS, PAPERS, GREY = "#1f5fa8", "#c0392b", "#999999"
#: The colour of each strategy or policy, the same in all figures.
COLOURS = {
    "holdfast": OURS,
    "best": OURS,
    "Lazarus": "#27803b",
    "mro": "#27803b",
    "mro, each layer its own nodes": "#7fbf7f",
    "spread": "#d68910",
    "spread, by expert number": "#f3c67a",
    "compact": GREY,
    "paper": PAPERS,
    "DS(FT)": "#d68910",
    "DS": PAPERS,
    "Tutel(FT)": "#8e44ad",
    "Tutel(FT), no padding": "#566573",
    "Tutel": "#c39bd3",
}


def make_sheet(columns: int, rows: int = 1, width: float = 5.2, height: float = 3.8) -> tuple[Any, list[Any]]:
    """Return a figure with this many panels, and the panels row by row."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width * columns, height * rows), layout="constrained")
    panels: Any = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(panels.flat)


def distinct_colours(number: int) -> list[Any]:
    """Return this many colours; neighbours differ."""
    from matplotlib import colormaps

    palette = colormaps["tab20"]
    return [palette(place % palette.N) for place in range(number)]


def draw_curves(axes: Any, by: Sequence[float], values: Mapping[str, Sequence[float]], *, marker: str = "o") -> None:
    """Draw one line per name in its colour; coinciding lines differ in width."""
    for place, (name, line) in enumerate(values.items()):
        size = max(7.5 - 1.2 * place, 3.0)
        axes.plot(by, line, marker=marker, markersize=size, linewidth=1.6, color=COLOURS.get(name), label=name)


def draw_bars(axes: Any, groups: Sequence[str], values: Mapping[str, Sequence[float]], *, form: str = "{:.0f}") -> None:
    """Draw one bar per group and name, with its number above it."""
    width = 0.8 / len(values)
    for place, (name, heights) in enumerate(values.items()):
        at = [group - 0.4 + width * (place + 0.5) for group in range(len(groups))]
        drawn = axes.bar(at, heights, width, color=COLOURS.get(name), label=name)
        axes.bar_label(drawn, [form.format(height) for height in heights], fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), groups)


def draw_stacked(axes: Any, groups: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Draw one stacked bar per group."""
    below = [0.0] * len(groups)
    for (name, heights), colour in zip(parts.items(), distinct_colours(2 * len(parts))[::2], strict=True):
        axes.bar(range(len(groups)), heights, 0.7, bottom=below, color=colour, label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_xticks(range(len(groups)), groups)


def draw_lines_and_totals(
    panels: tuple[Any, Any],
    title: str,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    totals: Mapping[str, float],
    paper: Mapping[str, float],
) -> None:
    """Draw lines over minutes in the upper panel, and total samples in the lower one.

    Args:
        lines: seconds and values by name.
        totals: total samples by name; the first one is compared with the others.
        paper: the first one's total divided by each other total, according to the paper.
    """
    above, below = panels
    for name, (seconds, values) in lines.items():
        above.plot([at / 60 for at in seconds], values, color=COLOURS.get(name), linewidth=1.4, label=name)
    above.set_title(title, fontsize=10)
    above.set_xlabel("minutes")
    above.set_ylim(bottom=0)
    names = list(totals)
    drawn = below.bar(range(len(names)), list(totals.values()), 0.7, color=[COLOURS.get(name, GREY) for name in names])
    below.bar_label(drawn, [f"{total:.0f}" for total in totals.values()], fontsize=8, padding=1)
    marks = [(names.index(name), totals[names[0]] / ratio) for name, ratio in paper.items()]
    if marks:
        below.plot(*zip(*marks, strict=True), "kx", markersize=8, label=f"{names[0]}, by the paper's ratio")
        below.legend(fontsize=8)
    below.set_xticks(range(len(names)), names, fontsize=8, rotation=12)


def label_lines_and_totals(panels: Sequence[Any]) -> None:
    """Label the axes of a sheet with lines above and totals below."""
    panels[0].set_ylabel("samples per second")
    panels[len(panels) // 2].set_ylabel("samples in all")
    panels[0].legend(fontsize=8)


def mark_paper_value(axes: Any, x: float, y: float, text: str) -> None:
    """Mark a number from the paper."""
    axes.plot([x], [y], marker="x", markersize=9, markeredgewidth=2.2, color=PAPERS, linestyle="none", zorder=5)
    axes.annotate(text, (x, y), xytext=(7, 5), textcoords="offset points", color=PAPERS, fontsize=8)


def save(figure: Any, folder: Path, name: str) -> None:
    """Write a picture and print its path; raise `BadInputError` if it cannot be written."""
    path = folder / f"{name}.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise BadInputError(f"--out {folder}: cannot be written ({error.strerror})") from None
    print(f"picture: {path}")
