"""How the pictures of `holdfast report` look. matplotlib is imported when one is drawn: it costs most of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.errors import BadInputError

BLUE, GREEN, RED, BROWN, GREY = "#1f5fa8", "#27803b", "#c0392b", "#7f6a00", "#999999"
_WIDTH_INCHES, _DOTS_PER_INCH = 10.0, 130


def new_figure(title: str, *, height_inches: float) -> Any:
    """Return a figure with its title at the top left."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure


def add_legend(axes: Any) -> None:
    """Add a grid, and above the panel a legend of its lines: a line may be anywhere within it."""
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=5, fontsize=8, frameon=False, borderaxespad=0.1)


def save_figure(figure: Any, path: Path, option: str) -> None:
    """Write a PNG. Dollar signs in texts are not read as formulas.

    Args:
        option: which has named the file.

    Raises:
        BadInputError: the file cannot be written.
    """
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # A name with a dollar sign is not a formula.
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    except (OSError, ValueError) as error:
        raise BadInputError(f"{option} {path} cannot be written: {error}") from None
