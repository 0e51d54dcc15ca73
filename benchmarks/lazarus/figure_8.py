"""Lazarus, Figures 8 and 10b: the exact probability that a model survives a number of lost nodes, by strategy.

10 nodes with 6 slots, f = 2. Figure 8: GPT-S at step 4000 and GPT-L at step 200, with recorded loads. The paper prints
one pair of numbers for 4 lost nodes and GPT-L: 0.41 with its placement, 0.12 with spread. Figure 10b: one layer of 8
experts, of which one gets 2 or 4 times the even share; the paper's curves have no numbers in the text.

A model survives only if all its layers survive. The paper plans each layer separately and does not say how nodes are
mapped across layers. Therefore MRO and spread are shown twice. In `holdfast`, all layers have the same node groups. In
the other reading, MRO has a separate order of nodes in each layer (mean of 50 random orders), and spread places experts
in the order of their numbers. The results are enumerated, not measured.

    python benchmarks/lazarus/figure_8.py [--data DIR] [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from drawing import draw_curves, make_sheet, mark_paper_value, save
from setting import MODELS, NODES, SLOTS, Recording, format_row, make_parser, make_testbed_plan, run_figure

from holdfast.planning import as_slots, recovery_curve
from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.planning.placement.fill import deal_replicas

#: Model, step, and the paper's numbers by strategy at PAPER_LOST lost nodes.
CASES: tuple[tuple[str, int, dict[str, float]], ...] = (("S", 4000, {}), ("L", 200, {"mro": 0.41, "spread": 0.12}))
PAPER_LOST = 4
ORDERS = 50
#: Figure 10b: load of the hot expert of 8, relative to its even share.
RATIOS = (2, 4)


def survival(counts: IntArray) -> FloatArray:
    """Return the survival probability `(N + 1,)` of replicas `(L, E, N)`, by number of lost nodes 0..N."""
    return recovery_curve(counts).probability


def mean_unaligned_survival(counts: IntArray) -> FloatArray:
    """Return the mean survival `(N + 1,)` of replicas `(L, E, N)` if each layer has its own random order of nodes."""
    rng = np.random.default_rng(0)
    nodes = counts.shape[2]
    found = [survival(np.stack([layer[:, rng.permutation(nodes)] for layer in counts])) for _ in range(ORDERS)]
    return np.mean(found, axis=0)


def spread_by_number(replicas: IntArray) -> IntArray:
    """Return spread replicas `(L, E, N)` of `(L, E)`, dealt expert by expert in the order of their numbers."""
    empty = np.zeros((*replicas.shape, NODES), dtype=np.int64)
    return deal_replicas(empty, replicas, as_slots(SLOTS, NODES))


def survival_by_strategy(loads: IntArray) -> dict[str, FloatArray]:
    """Return the survival `(N + 1,)` of loads `(L, E)` by strategy, in both readings if there are several layers."""
    plans = {name: make_testbed_plan(loads, NODES, name) for name in ("best", "mro", "spread", "compact")}
    found = {name: survival(plan.counts) for name, plan in plans.items()}
    if len(loads) > 1:
        found["mro, each layer its own nodes"] = mean_unaligned_survival(plans["mro"].counts)
        found["spread, by expert number"] = survival(spread_by_number(plans["spread"].replicas))
    return found


def hot_expert_loads(ratio: int) -> IntArray:
    """Return tokens `(1, 8)`: the first expert gets `ratio` times its even share, the others share the rest."""
    return np.array([[ratio * 7 * 8, *[(64 - 8 * ratio)] * 7]])


def show(axes: object, title: str, found: dict[str, FloatArray], paper: dict[str, float]) -> None:
    """Print and draw one panel."""
    lost = list(range(1, NODES))
    print(f"{title}\n  {'lost nodes':44}" + "".join(f"{number:7}" for number in lost))
    for name, values in found.items():
        print(format_row(name, values[1:NODES].tolist()))
    for name, value in paper.items():
        print(format_row(f"the paper: {name}", [value if number == PAPER_LOST else None for number in lost]))
    draw_curves(axes, lost, {name: values[1:NODES].tolist() for name, values in found.items()})
    for name, value in paper.items():
        mark_paper_value(axes, PAPER_LOST, value, f"paper, {name}: {value}")


def make(options: argparse.Namespace) -> None:
    """Print and draw both figures."""
    figure, panels = make_sheet(2, width=6.0, height=4.4)
    for axes, (model, step, paper) in zip(panels, CASES, strict=True):
        title = f"Figure 8: {MODELS[model].name}, step {step}"
        show(axes, title, survival_by_strategy(Recording(options.data, MODELS[model]).tokens_at(step)), paper)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("nodes lost at once, of 10")
    panels[0].set_ylabel("probability that the whole model survives")
    panels[0].legend(fontsize=8)
    save(figure, options.out, "figure_8")
    figure, panels = make_sheet(2, width=5.2)
    for axes, ratio in zip(panels, RATIOS, strict=True):
        title = f"Figure 10b: load ratio {ratio}:1"
        show(axes, title, survival_by_strategy(hot_expert_loads(ratio)), {})
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("nodes lost at once, of 10")
    panels[0].set_ylabel("probability that the layer survives")
    panels[0].legend(fontsize=8)
    save(figure, options.out, "figure_10b")


def main(words: Sequence[str] | None = None) -> int:
    """Run; return 2 if the data is missing."""
    return run_figure(make, make_parser(__doc__).parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
