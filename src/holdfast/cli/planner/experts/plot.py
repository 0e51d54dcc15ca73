"""The plot of `holdfast experts plan --plot`: the placement of experts, and the survival of each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.errors import BadInputError
from holdfast.planning import Plan, RecoveryCurve

#: Layers shown; more would be too small to read.
_MOST_LAYERS = 12


def draw(path: Path, plan: Plan, name: str, curves: dict[str, RecoveryCurve]) -> None:
    """Write a PNG: replicas per expert and node, one map per layer, next to the recovery curves of all strategies.

    At most `_MOST_LAYERS` layers are drawn.

    Args:
        name: the plan's strategy, for the title.
        curves: by strategy.

    Raises:
        BadInputError: the path does not end in .png, or cannot be written.
    """
    # Imported here: it takes a second, and only this option needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if path.suffix != ".png":
        raise BadInputError(f"--plot {path}: the name must end in .png")
    shown = min(len(plan.counts), _MOST_LAYERS)
    columns = min(shown, 4)
    rows = -(-shown // columns)
    width = max(2.4 * columns, 3.2) + 1.0
    figure: Any = Figure(figsize=(width + 5.4, max(2.3 * rows, 4.4) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subfigures(1, 2, width_ratios=[width, 5.4])
    maps = left.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    most = int(plan.counts[:shown].max())
    image = None
    for layer, axes in enumerate(maps.flat):
        if layer >= shown:
            axes.set_visible(False)
            continue
        image = axes.imshow(
            plan.counts[layer], aspect="auto", cmap="viridis", vmin=0, vmax=most, interpolation="nearest"
        )
        axes.set_title(f"layer {layer}", fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
    left.supxlabel("node")
    left.supylabel("expert")
    of = "" if shown == len(plan.counts) else f" (first {shown} of {len(plan.counts)} layers)"
    left.suptitle(f"Placement by {name}{of}", fontsize=11)
    if image is not None:
        left.colorbar(
            image, ax=maps, label="replicas of the expert on the node", shrink=0.8, ticks=MaxNLocator(integer=True)
        )
    _curves(right.subplots(), curves)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise BadInputError(f"--plot {path}: cannot be written ({error.strerror})") from None


def _curves(axes: Any, curves: dict[str, RecoveryCurve]) -> None:
    """Draw recovery by number of lost nodes; curves may coincide, so each has its own marker and size."""
    styles = {"best": ("o", 9.0), "mro": ("s", 6.5), "spread": ("^", 5.5), "compact": ("x", 5.5)}
    for name, curve in curves.items():
        marker, size = styles.get(name, (".", 6.0))
        lost = range(curve.probability.size)
        hollow = "none" if marker != "x" else None
        axes.plot(lost, curve.probability, marker=marker, markersize=size, markerfacecolor=hollow, label=name)
        if not curve.exact:
            axes.fill_between(lost, curve.low, curve.high, alpha=0.25)
    axes.set_xlabel("nodes lost at once")
    axes.set_ylabel("probability that the whole model survives")
    axes.set_title("Recovery, all layers at once", fontsize=11)
    axes.set_ylim(-0.02, 1.04)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
