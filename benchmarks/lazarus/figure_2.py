"""Lazarus, Figure 2: how the load of 16 experts (GPT-L) is distributed over time, in layers 1 and 8.

The paper states that up to 87 % of the tokens go to the two most popular experts. It does not say whether layers count
from 0, nor whether the first iterations count, in which two experts get all tokens: both numbers are shown. The loads
are recorded, not measured here.

    python benchmarks/lazarus/figure_2.py [--data DIR] [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from drawing import distinct_colours, make_sheet, save
from setting import MODELS, Recording, make_parser, run_figure

from holdfast.planning.arrays import FloatArray, IntArray

PAPER = 0.87
LAYERS = (0, 7)
#: In the first iterations, all tokens go to two experts in every model.
WARM_UP = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The largest share of a layer's tokens that two experts have, and its iteration."""

    share: float
    iteration: int


def shares_of(tokens: IntArray) -> FloatArray:
    """Return each expert's share of its layer's tokens, in the shape of `tokens` `(T, L, E)`."""
    return tokens / tokens.sum(axis=2, keepdims=True)


def find_peak(shares: FloatArray, iterations: IntArray, layer: int, since: int) -> Peak:
    """Return the largest share of two experts of a layer, from an iteration on."""
    two = np.sort(shares[:, layer], axis=1)[:, -2:].sum(axis=1)
    two = np.where(iterations >= since, two, 0.0)
    return Peak(share=float(two.max()), iteration=int(iterations[two.argmax()]))


def make(options: argparse.Namespace) -> None:
    """Print the peaks and draw the loads."""
    recording = Recording(options.data, MODELS["L"])
    shares, iterations = shares_of(recording.tokens), recording.iterations
    print(f"Figure 2: the two most popular of 16 experts (GPT-L); the paper: up to {PAPER:.2f} of the tokens")
    print("  layer (from 0)      all iterations             from iteration 101 on      at the end")
    for layer in range(shares.shape[1]):
        ever, later = (find_peak(shares, iterations, layer, since) for since in (0, WARM_UP + 1))
        last = float(np.sort(shares[-1, layer])[-2:].sum())
        print(
            f"  {layer:5}          {ever.share:.3f} (iteration {ever.iteration:4})     {later.share:.3f} "
            f"(iteration {later.iteration:4})     {last:.3f}"
        )
    figure, panels = make_sheet(2, width=6.4)
    for axes, layer in zip(panels, LAYERS, strict=True):
        order = np.argsort(-shares[:, layer].mean(axis=0))
        axes.stackplot(iterations, shares[:, layer, order].T, linewidth=0, colors=distinct_colours(len(order)))
        axes.set_ylim(0, 1)
        axes.set_xlim(int(iterations[0]), int(iterations[-1]))
        axes.set_title(f"layer {layer + 1}: each band is one expert", fontsize=10)
        axes.set_xlabel("iteration")
    panels[0].set_ylabel("share of the layer's tokens")
    save(figure, options.out, "figure_2")


def main(words: Sequence[str] | None = None) -> int:
    """Run; return 2 if the data is missing."""
    return run_figure(make, make_parser(__doc__).parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
