"""Lazarus, Figures 9 and 11: 80 minutes of a spot trace (up to 10 nodes), and how the time was spent.

MODELLED on the paper's testbed (`testbed.py` has each number with its source). The paper does not say how it reduced
the recorded 32 nodes to 10, so three reconstructions of the trace are used. Lazarus writes checkpoints here too. The
paper's numbers: Lazarus' samples relative to DS and DS(FT); overheads below 10 % of Lazarus' time, over half of DS's,
and 27 % of DS(FT)'s with GPT-L.

MEASURED on this machine: `figures_measured.py`.

    python benchmarks/lazarus/figures_9_11.py [--data DIR] [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from drawing import COLOURS, draw_stacked, make_sheet, save
from figures_6_7 import compared_policies
from modelled_job import CAUSES, JobResult, ModelledJob, rates
from setting import MODELS, NODES, make_parser, require_file, run_figure
from testbed import Hardware

from holdfast.planning.availability import Window, parse_trace, select_window

TRACES = ("lazarus_p3_80min_cap10", "lazarus_p3_80min_cap10_firstjoined", "lazarus_p3_80min_scaled10")
SECONDS = 4800.0
#: Samples relative to DS and to DS(FT) (section 6.4).
PAPER = {"S": (2.3, 1.2), "L": (3.4, 1.8)}


def window(data: Path, trace: str) -> Window:
    """Return the 80 minutes of a trace."""
    text = require_file(data, Path("spot") / f"{trace}.csv").read_text()
    return select_window(parse_trace(text), end=SECONDS)


def compare(data: Path, model: str, trace: str) -> dict[str, JobResult]:
    """Run all policies through a trace."""
    testbed = Hardware(model=MODELS[model], data=data)
    lived_through = window(data, trace)
    return {
        name: ModelledJob(policy, testbed.costs(policy, NODES), lived_through).run()
        for name, policy in compared_policies(testbed).items()
    }


def show(model: str, found: dict[str, JobResult]) -> None:
    """Print one model's rows: samples, and how the time was spent."""
    paper_ds, paper_ft = PAPER.get(model, (None, None))
    for name, lived in found.items():
        paper = {"DS": paper_ds, "DS(FT)": paper_ft}.get(name)
        times = "  ".join(f"{lived.share(cause):9.0%}" for cause in CAUSES)
        ratio = found["Lazarus"].samples / max(1, lived.samples)
        said = "-" if paper is None else str(paper)
        print(
            f"  {MODELS[model].name}  {name:9}{lived.samples:8}   {ratio:5.2f}  {said:>5}  {lived.restarts:8}  {times}"
        )


def make(options: argparse.Namespace) -> None:
    """Print and draw both figures."""
    print("Figures 9 and 11, MODELLED")
    head = "  ".join(f"{cause:>9}" for cause in CAUSES)
    drawn: dict[str, dict[str, JobResult]] = {}
    for trace in TRACES:
        print(f"{trace}:\n  model  policy    samples   Lazarus' over, paper  restarts  {head}")
        for model in MODELS:
            found = compare(options.data, model, trace)
            show(model, found)
            drawn.setdefault(model, found)
    draw(options.out, drawn)


def draw(out: Path, drawn: dict[str, dict[str, JobResult]]) -> None:
    """Draw both figures from the results of each model."""
    figure, panels = make_sheet(len(drawn), width=5.0)
    for axes, (model, found) in zip(panels, drawn.items(), strict=True):
        for name, lived in found.items():
            times, line = rates(lived, every=120.0)
            axes.plot([time / 60 for time in times], line, color=COLOURS[name], linewidth=1.4, label=name)
        axes.set_title(f"Figure 9, {MODELS[model].name} (modelled)", fontsize=10)
        axes.set_xlabel("minutes")
    panels[0].set_ylabel("samples per second")
    panels[0].legend(fontsize=8)
    save(figure, out, "figure_9")
    figure, panels = make_sheet(len(drawn), width=4.6)
    for axes, (model, found) in zip(panels, drawn.items(), strict=True):
        draw_stacked(axes, list(found), {cause: [lived.share(cause) for lived in found.values()] for cause in CAUSES})
        axes.set_title(f"Figure 11, {MODELS[model].name} (modelled)", fontsize=10)
    panels[0].set_ylabel("share of the time")
    panels[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(figure, out, "figure_11")


def main(words: Sequence[str] | None = None) -> int:
    """Run; return 2 if the data is missing."""
    return run_figure(make, make_parser(__doc__).parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
