"""Lazarus, Figures 6 and 7: one of ten nodes fails every 5 or every 40 minutes, until half of them are left.

MODELLED on the paper's testbed (`testbed.py` has each number with its source) for GPT-S, GPT-M and GPT-L: mean and
range over 10 random orders in which nodes fail. Compared are Lazarus (MRO, replanned after each change), holdfast's
placement instead (`best`, which keeps surviving replicas) with the same costs, and DS(FT) and DS with DeepSpeed's
padding. The paper prints Lazarus' samples relative to DS and DS(FT), and its steps.

MEASURED on this machine: real jobs with small experts and an EMULATED accelerator, `python benchmarks/spot.py --single`
(`figures_measured.py` runs it, and the spot trace).

    python benchmarks/lazarus/figures_6_7.py [--data DIR] [--out DIR] [--orders 10] [--restart-s 180]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from drawing import draw_lines_and_totals, label_lines_and_totals, make_sheet, save
from modelled_job import JobResult, ModelledJob, Policy, rates
from setting import MODELS, NODES, at_least, from_zero, make_parser, run_figure
from testbed import RESTART_S, Hardware

from holdfast.planning.availability import Batch, NodeEvent, Window

#: Seconds between failures, total seconds, and the factor between checkpoint intervals.
FIGURES = {6: (300.0, 1800.0, 1), 7: (2400.0, 14400.0, 4)}
#: Lazarus' samples relative to DS and DS(FT), and its steps (section 6.2); None if the paper does not print it.
PAPER = {
    (6, "S"): (2.8, 1.4, 2926),
    (6, "L"): (5.7, 2.8, 1996),
    (7, "S"): (1.6, None, None),
    (7, "L"): (2.3, None, None),
}
NAMES = ("Lazarus", "holdfast", "DS(FT)", "DS")


def failure_window(order: Sequence[str], every: float, seconds: float) -> Window:
    """Return a window in which the first half of `order` fails, one after the other."""
    gone = order[: len(order) // 2]
    batches = tuple(
        Batch(
            seconds=every * number,
            events=(NodeEvent(seconds=every * number, add=False, node=node, line=0),),
        )
        for number, node in enumerate(gone, 1)
        if every * number < seconds
    )
    return Window(start_nodes=tuple(sorted(order)), batches=batches, seconds=seconds)


def shuffled_nodes(nodes: int, seed: int) -> list[str]:
    """Return nodes in a random order."""
    names = [f"node{number:02}" for number in range(nodes)]
    random.Random(seed).shuffle(names)
    return names


def compared_policies(testbed: Hardware) -> dict[str, Policy]:
    """Return the compared policies by name."""
    return {
        "Lazarus": testbed.elastic("Lazarus"),
        "holdfast": testbed.elastic("holdfast"),
        "DS(FT)": testbed.static("DS(FT)", live=True),
        "DS": testbed.static("DS", live=False),
    }


def compare(
    data: Path, figure: int, model: str, orders: int, restart_s: float = RESTART_S
) -> dict[str, list[JobResult]]:
    """Run all policies through the same failures, `orders` times."""
    every, seconds, rare = FIGURES[figure]
    testbed = Hardware(model=MODELS[model], data=data, restart_s=restart_s)
    found: dict[str, list[JobResult]] = {name: [] for name in NAMES}
    for name, policy in compared_policies(testbed).items():
        costs = testbed.costs(policy, NODES, rare)
        for seed in range(orders):
            window = failure_window(shuffled_nodes(NODES, seed), every, seconds)
            found[name].append(ModelledJob(policy, costs, window).run())
    return found


def mean_samples(lived: Sequence[JobResult]) -> float:
    """Return the mean samples of a policy over the orders."""
    return float(np.mean([one.samples for one in lived]))


def format_ratio(ours: Sequence[JobResult], others: Sequence[JobResult]) -> str:
    """Format the ratio of samples for each order: mean and range."""
    each = [one.samples / max(1, other.samples) for one, other in zip(ours, others, strict=True)]
    return f"{np.mean(each):.2f} ({min(each):.2f}..{max(each):.2f})"


def show(figure: int, model: str, found: dict[str, list[JobResult]]) -> None:
    """Print one model's rows."""
    paper_ds, paper_ft, paper_steps = PAPER.get((figure, model), (None, None, None))
    lazarus = found["Lazarus"]
    for name, lived in found.items():
        paper = {"DS": paper_ds, "DS(FT)": paper_ft}.get(name)
        said = "-" if name == "Lazarus" else format_ratio(lazarus, lived)
        steps = float(np.mean([one.steps for one in lived]))
        of_steps = f" (paper {paper_steps})" if name == "Lazarus" and paper_steps else ""
        print(
            f"  {MODELS[model].name:6} {name:9} {mean_samples(lived):9.0f}   {said:22} "
            f"{'-' if paper is None else paper!s:>5}   {lived[0].share('effective'):9.2f}   "
            f"{np.mean([one.restarts for one in lived]):8.1f}   {steps:6.0f}{of_steps}"
        )


def make(options: argparse.Namespace) -> None:
    """Print and draw both figures."""
    for figure, (every, seconds, _) in FIGURES.items():
        print(
            f"Figure {figure}: a node fails every {every / 60:g} minutes, {seconds / 60:g} minutes; MODELLED, mean "
            f"(range) over {options.orders} orders\n"
            "  model  policy      samples   Lazarus' over its      paper   effective   restarts    steps"
        )
        drawing, panels = make_sheet(len(MODELS), 2, width=5.0, height=3.4)
        for place, model in enumerate(MODELS):
            found = compare(options.data, figure, model, options.orders, options.restart_s)
            show(figure, model, found)
            paper_ds, paper_ft, _ = PAPER.get((figure, model), (None, None, None))
            draw_lines_and_totals(
                (panels[place], panels[len(MODELS) + place]),
                f"Figure {figure}, {MODELS[model].name} (modelled)",
                {name: rates(lived[0], every=seconds / 60) for name, lived in found.items()},
                {name: mean_samples(lived) for name, lived in found.items()},
                {name: ratio for name, ratio in (("DS(FT)", paper_ft), ("DS", paper_ds)) if ratio},
            )
        label_lines_and_totals(panels)
        save(drawing, options.out, f"figure_{figure}")


def main(words: Sequence[str] | None = None) -> int:
    """Run; return 2 if the data is missing."""
    parser = make_parser(__doc__)
    parser.add_argument("--orders", type=at_least(1), default=10, help="random orders in which nodes fail")
    parser.add_argument("--restart-s", type=from_zero, default=RESTART_S, help="seconds of a restart without loading")
    return run_figure(make, parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
