"""Lazarus, Figures 8 and 10b: the probability that a model survives so many lost nodes, by strategy. Exact.

10 nodes of 6 slots, f = 2; Figure 8: GPT-S at step 4000 and GPT-L at step 200, recorded loads. The paper prints one
pair of numbers: 4 lost nodes, GPT-L: 0.41 by its placement, 0.12 by spread. Figure 10b: one layer of 8 experts, one of
which gets 2 or 4 times what it would get if all had the same; the paper's curves have no numbers in the text.

A model survives only if all its layers do. The paper plans each layer on its own and does not say how nodes are mapped
across layers. So MRO and spread stand here twice: as `holdfast` has them, with the same node groups in all layers, and
in the other reading: MRO with an order of nodes of its own in each layer (mean of 50 random orders), spread with the
experts in the order of their numbers. Enumerated, nothing is measured.

    python benchmarks/lazarus/figure_8.py [--data DIR] [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from drawing import curves, papers, save, sheet
from setting import MODELS, NODES, SLOTS, Recording, finish, parser_of, planned, row

from holdfast.planning import as_slots, recovery_curve
from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.planning.placement.fill import deal

#: model, step, and the paper's numbers by strategy at PAPER_LOST lost nodes
CASES: tuple[tuple[str, int, dict[str, float]], ...] = (("S", 4000, {}), ("L", 200, {"mro": 0.41, "spread": 0.12}))
PAPER_LOST = 4
ORDERS = 50
#: Figure 10b: how many times its even share the hot one of 8 experts gets
RATIOS = (2, 4)


def survival(counts: IntArray) -> FloatArray:
    """Return the probability by number of lost nodes 0..N, `(N + 1,)`, of replicas `(L, E, N)`."""
    return recovery_curve(counts).probability


def unaligned(counts: IntArray) -> FloatArray:
    """Return the mean survival `(N + 1,)` of replicas `(L, E, N)` whose layers have random orders of nodes each."""
    rng = np.random.default_rng(0)
    nodes = counts.shape[2]
    found = [survival(np.stack([layer[:, rng.permutation(nodes)] for layer in counts])) for _ in range(ORDERS)]
    return np.mean(found, axis=0)


def by_number(replicas: IntArray) -> IntArray:
    """Return spread replicas `(L, E, N)` of `(L, E)`, dealt expert by expert in the order of their numbers."""
    empty = np.zeros((*replicas.shape, NODES), dtype=np.int64)
    return deal(empty, replicas, as_slots(SLOTS, NODES))


def strategies_on(loads: IntArray) -> dict[str, FloatArray]:
    """Return the survival `(N + 1,)` of loads `(L, E)` by strategy, in both readings where there are several layers."""
    plans = {name: planned(loads, NODES, name) for name in ("best", "mro", "spread", "compact")}
    found = {name: survival(plan.counts) for name, plan in plans.items()}
    if len(loads) > 1:
        found["mro, each layer its own nodes"] = unaligned(plans["mro"].counts)
        found["spread, by expert number"] = survival(by_number(plans["spread"].replicas))
    return found


def hot_expert(ratio: int) -> IntArray:
    """Return tokens `(1, 8)`: the first expert gets `ratio` times its even share, the others share the rest."""
    return np.array([[ratio * 7 * 8, *[(64 - 8 * ratio)] * 7]])


def show(axes: object, title: str, found: dict[str, FloatArray], paper: dict[str, float]) -> None:
    """Print and draw one panel."""
    lost = list(range(1, NODES))
    print(f"{title}\n  {'lost nodes':44}" + "".join(f"{number:7}" for number in lost))
    for name, values in found.items():
        print(row(name, values[1:NODES].tolist()))
    for name, value in paper.items():
        print(row(f"the paper: {name}", [value if number == PAPER_LOST else None for number in lost]))
    curves(axes, lost, {name: values[1:NODES].tolist() for name, values in found.items()})
    for name, value in paper.items():
        papers(axes, PAPER_LOST, value, f"paper, {name}: {value}")


def make(options: argparse.Namespace) -> None:
    """Print and draw both figures."""
    figure, panels = sheet(2, width=6.0, height=4.4)
    for axes, (model, step, paper) in zip(panels, CASES, strict=True):
        title = f"Figure 8: {MODELS[model].name}, step {step}"
        show(axes, title, strategies_on(Recording(options.data, MODELS[model]).at(step)), paper)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("nodes lost at once, of 10")
    panels[0].set_ylabel("probability that the whole model survives")
    panels[0].legend(fontsize=8)
    save(figure, options.out, "figure_8")
    figure, panels = sheet(2, width=5.2)
    for axes, ratio in zip(panels, RATIOS, strict=True):
        title = f"Figure 10b: load ratio {ratio}:1"
        show(axes, title, strategies_on(hot_expert(ratio)), {})
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("nodes lost at once, of 10")
    panels[0].set_ylabel("probability that the layer survives")
    panels[0].legend(fontsize=8)
    save(figure, options.out, "figure_10b")


def main(words: Sequence[str] | None = None) -> int:
    """Run; 2 where the data is not there."""
    return finish(make, parser_of(__doc__).parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
