"""Lazarus, Figure 10a: throughput of one MoE layer of 8 experts as one expert gets more and more tokens.

MEASURED on this machine with 4 ranks and an EMULATED accelerator (a stated time per token, the same for all sides). It
draws the measurements of `benchmarks/layer_throughput.py`. The paper (10 GPUs, 1024 wide) shows a curve without numbers
in its text: Lazarus' throughput stays constant, DS's falls, and at 1:1 Lazarus is slightly slower.

    python benchmarks/lazarus/figure_10a.py [--out DIR] [--repeats 3] [--tokens 256]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from drawing import make_sheet, save
from setting import above_zero, at_least, make_parser, run_figure

from tests.harness.local_world import run_world

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from layer_throughput import RANKS, SHARES, SIDES, measure, print_report

COLOURED = dict(zip(SIDES, ("#c0392b", "#1f5fa8", "#7fa7d1", "#d68910"), strict=True))


def make(options: argparse.Namespace) -> None:
    """Measure, print and draw."""
    words = (options.repeats, options.tokens, options.seconds_per_token)
    ranks = run_world(RANKS, measure, *words, timeout_s=900)
    total = RANKS * options.tokens
    rates = {key: total / np.array([rank[key] for rank in ranks]).max(axis=0) for key in ranks[0]}
    print(f"Figure 10a, MEASURED, EMULATED accelerator: {options.seconds_per_token:g} s a token, {total} tokens")
    print_report(rates)
    figure, panels = make_sheet(1, width=6.4)
    for side in SIDES:
        values = [rates[share, side] for share in SHARES]
        middle = [float(np.median(value)) for value in values]
        spread = [
            [mid - float(value.min()) for mid, value in zip(middle, values, strict=True)],
            [float(value.max()) - mid for mid, value in zip(middle, values, strict=True)],
        ]
        panels[0].errorbar(SHARES, middle, spread, marker="o", capsize=3, color=COLOURED[side], label=side)
    panels[0].set_xticks(SHARES, [f"{share}:1" for share in SHARES])
    panels[0].set_ylim(0)
    panels[0].set_xlabel("tokens of the hot expert over its even share")
    panels[0].set_ylabel("tokens per second (emulated accelerator)")
    panels[0].legend(fontsize=8)
    save(figure, options.out, "figure_10a")


def main(words: Sequence[str] | None = None) -> int:
    """Run."""
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--tokens", type=at_least(1), default=256, help="tokens per rank")
    parser.add_argument("--seconds-per-token", type=above_zero, default=5e-4)
    return run_figure(make, parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
