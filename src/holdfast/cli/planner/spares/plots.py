"""Pictures for `holdfast spares`. matplotlib is imported when one is drawn, not before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.cli.planner.spares.report import LOSS_WORDS
from holdfast.errors import BadInputError
from holdfast.planner.reliability.sparing.case import SparingCase, SparingStrategy
from holdfast.planner.reliability.sparing.evaluation import Evaluation, evaluate_strategy
from holdfast.planner.reliability.sparing.losses import losses
from holdfast.planner.reliability.sparing.sensitivity import SensitivityMap
from holdfast.planner.reliability.traces.fit import TraceFit
from holdfast.planner.reliability.traces.trace import FailureTrace
from holdfast.planning.special import FloatArray


def _figure(title: str, width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """Return a new figure (size in inches), and its axes: one, or an array of several rows or columns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure: Any
    figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure, axes


def _save(figure: Any, directory: Path, name: str) -> Path:
    """Write a figure into a PNG of the folder, which is made if missing; close the figure, and return the path.

    Raises:
        BadInputError: the file cannot be written.
    """
    from matplotlib import pyplot

    path = directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise BadInputError(f"--plot {directory}: cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)
    return path


def _color(index: int) -> Any:
    from matplotlib.pyplot import get_cmap

    # Pairs of light and dark: strategies often come as one block size with and without spare trays.
    return get_cmap("Paired")(index % 12)


def plot_losses(case: SparingCase, evaluation: Evaluation, directory: Path) -> Path:
    """Draw where each strategy's GPU time goes. Return the path of the PNG in the folder."""
    figure, axes = _figure("Use of the GPU time, by strategy", 10, 2.1 + 0.55 * len(evaluation.strategies))
    names = [outcome.strategy.label for outcome in evaluation.strategies]
    parts = [losses(case, outcome) for outcome in evaluation.strategies]
    left = np.array([float(outcome.cett) for outcome in evaluation.strategies])
    axes.barh(names, 100 * left, color="#4c9f70", label="useful (CETT)")
    colors = ("#c7d3dd", "#8fa9bf", "#54738c", "#c44e52", "#f2d388", "#e5a04b", "#c8743a")
    for (name, _), color in zip(parts[0].items(), colors, strict=True):
        width = np.array([float(getattr(part, name)) for part in parts])
        axes.barh(names, 100 * width, left=100 * left, color=color, label=LOSS_WORDS[name])
        left = left + width
    for y, outcome in enumerate(evaluation.strategies):
        axes.text(1, y, f"{float(outcome.goodput_gpus):,.0f} GPUs of goodput", va="center", color="white", fontsize=9)
    axes.set(xlim=(0, 100), xlabel="share of GPU time, %", ylabel="block / working GPUs")
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return _save(figure, directory, "losses.png")


def plot_spare_blocks(case: SparingCase, evaluation: Evaluation, directory: Path) -> Path:
    """Draw goodput over the share of spare blocks, without placement, and mark the chosen counts.

    Return the path of the PNG in the folder.
    """
    figure, axes = _figure("Goodput by the share of spare blocks, for each strategy", 9, 5.8)
    chosen = max(int(outcome.spare_blocks) / outcome.blocks for outcome in evaluation.strategies)
    shown = min(1.0, max(0.04, 2.0 * chosen))
    for index, outcome in enumerate(evaluation.strategies):
        spares = np.unique(np.linspace(0, shown * (outcome.blocks - 1), 150).astype(int))
        free = replace(case, placement=None)
        goodput = [float(_with_spares(free, outcome.strategy, int(count))) for count in spares]
        color = _color(index)
        axes.plot(100 * spares / outcome.blocks, goodput, color=color, label=outcome.strategy.label)
        axes.plot(100 * int(outcome.spare_blocks) / outcome.blocks, float(outcome.goodput_gpus), "o", color=color)
    axes.set(xlabel="spare and stranded blocks, % of a zone's blocks", ylabel="goodput, GPUs", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(title="block / working GPUs\n(dot: chosen, as placement allows)", loc="lower right")
    return _save(figure, directory, "spare_blocks.png")


def _with_spares(case: SparingCase, strategy: SparingStrategy, spare_blocks: int) -> Any:
    return evaluate_strategy(case, replace(strategy, spare_blocks=spare_blocks)).goodput_gpus


def plot_maps(maps: list[SensitivityMap], case: SparingCase, directory: Path) -> Path:
    """Draw the four maps of the MTBF-MTTR plane, one color per strategy, with boundaries and labels.

    A star marks this cluster, if it lies in the map. Return the path of the PNG in the folder.
    """
    figure, axes = _figure("The best strategy by how often a tray fails, and how long its repair takes", 12, 9.8, 2, 2)
    for panel, one in zip(axes.flat, maps, strict=True):
        _draw_map(panel, one)
        mtbf, mttr = float(case.failures.mtbf_tray_hours), float(case.failures.mttr_hours)
        inside = one.mtbf_tray_hours[0] <= mtbf <= one.mtbf_tray_hours[-1]
        if inside and one.mttr_hours[0] <= mttr <= one.mttr_hours[-1]:
            panel.plot(mtbf, mttr, "k*", markersize=11)
        panel.set(title=one.scenario.name, xlabel="tray MTBF, hours", ylabel="MTTR, hours")
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=_color(i), label=s.label) for i, s in enumerate(maps[0].strategies)]
    handles.append(Line2D([], [], color="k", marker="*", linestyle="", markersize=11, label="this cluster"))
    handles.append(Patch(color="#dddddd", label="no goodput"))
    figure.legend(handles=handles, title="best strategy: block / working GPUs", loc="outside lower center", ncols=8)
    return _save(figure, directory, "map.png")


def _draw_map(panel: Any, one: SensitivityMap) -> None:
    """Draw which strategy is best at each MTBF and MTTR, with borders and labels. Grey: no goodput."""
    best = one.best
    count = len(one.strategies)
    from matplotlib.colors import ListedColormap

    colors = ListedColormap([_color(index) for index in range(count)]).with_extremes(bad="#dddddd")
    hopeless = one.hopeless
    panel.pcolormesh(
        one.mtbf_tray_hours,
        one.mttr_hours,
        np.ma.masked_array(best, hopeless),
        cmap=colors,
        vmin=-0.5,
        vmax=count - 0.5,
        shading="nearest",
    )
    panel.set(xscale="log", yscale="log")
    for index, share in enumerate(one.shares):
        region = (best == index) & ~hopeless
        if region.any() and not region.all():
            panel.contour(
                one.mtbf_tray_hours, one.mttr_hours, region.astype(float), levels=[0.5], colors="k", linewidths=0.8
            )
        if region.mean() > 0.03:
            row, column = _middle(region)
            panel.text(
                one.mtbf_tray_hours[column],
                one.mttr_hours[row],
                f"{one.strategies[index].label}\n{100 * share:.0f}%",
                ha="center",
                va="center",
                fontsize=9,
                weight="bold",
                bbox={"boxstyle": "round", "facecolor": "white", "alpha": 0.75, "linewidth": 0},
            )


def _middle(region: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Return row and column of the point in a region (a mask) that is farthest from its edge, for a label."""
    from scipy import ndimage  # pyright: ignore[reportMissingTypeStubs]

    untyped: Any = ndimage
    depth: FloatArray = untyped.distance_transform_edt(np.pad(region, 1))[1:-1, 1:-1]
    row, column = np.unravel_index(int(np.argmax(depth)), depth.shape)
    return int(row), int(column)


def plot_fit(trace: FailureTrace, fit: TraceFit, directory: Path) -> Path:
    """Draw how many gaps and repairs last longer than each time, and the exponential and Weibull fits.

    Return the path of the PNG in the folder.
    """
    figure, axes = _figure("How long gaps and repairs last in the trace", 11, 4.9, 1, 2)
    for panel, hours, shape, title in (
        (axes[0], trace.gap_hours, fit.gaps, "gaps between failures of the fleet"),
        (axes[1], trace.repair_hours, fit.repairs, "repairs"),
    ):
        ordered = np.sort(hours)
        left = 1.0 - np.arange(ordered.size) / ordered.size
        first = max(float(ordered[ordered > 0][0]), 1e-3 * shape.mean_hours)
        times: FloatArray = np.geomspace(first, float(ordered[-1]), 200)
        panel.step(np.maximum(ordered, times[0]), left, where="pre", color="k", label="trace")
        panel.plot(times, np.exp(-times / shape.mean_hours), color="#c44e52", label="exponential, same mean")
        panel.plot(times, np.exp(-((times / shape.weibull.scale) ** shape.weibull.shape)), "--", label="Weibull fit")
        panel.set(xscale="log", yscale="log", title=title, xlabel="hours", ylabel="share that is longer")
        panel.set_ylim(0.5 / ordered.size, 1.5)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    return _save(figure, directory, "fit.png")
