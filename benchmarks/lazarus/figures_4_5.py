"""Lazarus, Figures 4 and 5: placements of 4 experts on 5 nodes, and the losses of 3 nodes that they survive. Exact.

Figure 4 (4 slots per node): the paper's plan A survives 5 of 10 losses, plan B 7. It prints the pairs of nodes that
recover under plan A; the placement here has the same pairs. Figure 5 (2 slots, replicas 2, 2, 3, 3): case I survives
all but 4 of 10 losses, case II all but 7. Case III (two experts of different groups swapped) has no number in the
paper, only "more". The output also shows the placement of `best`, and the best of all placements (brute force).

    python benchmarks/lazarus/figures_4_5.py [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from drawing import PAPERS, make_sheet, save
from setting import make_parser, run_figure

from holdfast.planning import PlacementProblem, from_node_lists, node_lists, recovery_curve, strategy_named
from holdfast.planning.arrays import IntArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from brute_force import all_patterns

LOST, NODES, EXPERTS = 3, 5, 4
NAMES = "ABCD"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One placement of a figure: each node's experts, and the number of 10 losses that it survives in the paper."""

    figure: int
    name: str
    nodes: tuple[str, ...]
    paper: int | None

    @property
    def counts(self) -> IntArray:
        """Replicas `(E, N)`."""
        return from_node_lists([[NAMES.index(expert) for expert in held] for held in self.nodes], EXPERTS)


PRINTED = (
    Case(figure=4, name="plan A", nodes=("ACDD", "ABDD", "BDDD", "BCDD", "CDDD"), paper=5),
    Case(figure=4, name="plan B", nodes=("ABCD", "ABCD", "BCDD", "DDDD", "DDDD"), paper=7),
    Case(figure=5, name="case I", nodes=("AB", "AB", "CD", "CD", "CD"), paper=6),
    Case(figure=5, name="case II", nodes=("AB", "AD", "BC", "CD", "CD"), paper=3),
    Case(figure=5, name="case III", nodes=("AC", "AC", "BD", "BD", "CD"), paper=None),
)


def surviving_sets(counts: IntArray) -> list[tuple[int, ...]]:
    """Return the sets of nodes, numbered from 1, that hold all experts of `counts` `(E, N)` after a loss."""
    return [
        tuple(node + 1 for node in alive)
        for alive in combinations(range(NODES), NODES - LOST)
        if counts[:, alive].any(axis=1).all()
    ]


def place_by_best(case: Case) -> Case:
    """Return the placement that `best` chooses for a case's replicas."""
    replicas, slots = case.counts.sum(axis=1), case.counts.sum(axis=0)
    problem = PlacementProblem(replicas=replicas[None], slots=slots, fault_threshold=int(replicas.min()))
    lists = node_lists(strategy_named("best").place(problem)[0])
    nodes = tuple("".join(NAMES[expert] for expert in held) for held in lists)
    return Case(figure=case.figure, name="holdfast", nodes=nodes, paper=None)


def count_best_survivals(case: Case) -> int:
    """Return the number of losses that the best placement of a case's replicas survives."""
    patterns = all_patterns(NODES, int(case.counts.sum(axis=0)[0]), EXPERTS)
    return round(10 * float(patterns.curves(case.counts.sum(axis=1), 1)[:, LOST].max()))


def make(options: argparse.Namespace) -> None:
    """Print the losses that each placement survives, and draw the placements."""
    cases = [*PRINTED[:2], place_by_best(PRINTED[0]), *PRINTED[2:], place_by_best(PRINTED[2])]
    print(f"Figures 4 and 5: survived losses of {LOST} of {NODES} nodes, of 10")
    for case in cases:
        pairs = surviving_sets(case.counts)
        assert len(pairs) == round(10 * recovery_curve(case.counts).probability[LOST])
        paper = "-" if case.paper is None else case.paper
        shown = " ".join(f"{a}{b}" for a, b in pairs)
        print(
            f"  Figure {case.figure} {case.name:9} {' '.join(case.nodes):26} ours {len(pairs):2}  paper {paper!s:>2}  "
            f"best of all {count_best_survivals(case)}  enough: {shown}"
        )
    figure, panels = make_sheet(4, 2, width=3.2, height=3.0)
    places = [0, 1, 2, 4, 5, 6, 7]
    for place, case in zip(places, cases, strict=True):
        axes = panels[place]
        axes.imshow(np.minimum(case.counts, 2), cmap="Blues", vmin=0, vmax=3, aspect="auto")
        axes.grid(visible=False)
        axes.set_xticks(range(NODES), range(1, NODES + 1))
        axes.set_yticks(range(EXPERTS), NAMES)
        axes.set_xlabel("node")
        for expert, node in np.argwhere(case.counts > 0):
            axes.text(node, expert, int(case.counts[expert, node]), ha="center", va="center", fontsize=9)
        said = "" if case.paper is None else f" (paper {case.paper})"
        axes.set_title(
            f"Figure {case.figure}, {case.name}:\nsurvives {len(surviving_sets(case.counts))}/10{said}", fontsize=9
        )
    panels[3].axis("off")
    panels[3].text(0, 0.5, f"{LOST} of {NODES} nodes lost;\nnumbers: replicas", color=PAPERS, fontsize=10)
    save(figure, options.out, "figures_4_5")


def main(words: Sequence[str] | None = None) -> int:
    """Run."""
    return run_figure(make, make_parser(__doc__).parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
