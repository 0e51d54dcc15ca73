"""The common parts of Unicron's figures: the testbed and its numbers, the options, and assumptions in a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from lazarus.drawing import COLOURS  # noqa: E402
from lazarus.setting import run_figure  # noqa: E402

#: Section 7.1: 16 nodes of 8 A800.
NODES, GPUS = 16, 128
#: Section 7.5: Unicron's accumulated WAF relative to each other system.
PAPERS_RATIOS = {
    "trace a": {"megatron": 1.2, "bamboo": 4.6, "oobleck": 3.7, "varuna": 4.8},
    "trace b": {"megatron": 1.9, "bamboo": 4.8, "oobleck": 3.8, "varuna": 5.8},
}
COLOURS.update(
    {
        "waf": COLOURS["holdfast"],
        "hit-only": "#27803b",
        "megatron": "#c0392b",
        "megatron-spare": "#e59866",
        "bamboo": "#8e44ad",
        "oobleck": "#d68910",
        "varuna": "#566573",
        "equally": "#d68910",
        "weighted": "#8e44ad",
        "sized": "#566573",
    }
)


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common options of all figures."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "unicron", help="folder for the pictures")
    return parser


def run_unicron_figure(make: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """Make a figure; return 2 if it cannot be written."""
    return run_figure(make, options)


def write_assumptions(figure: Any, said: Sequence[str], width: int = 200) -> None:
    """Write the assumptions below the picture."""
    lines = [fill(f"- {text}", width, subsequent_indent="  ") for text in dict.fromkeys(said)]
    figure.supxlabel("\n".join(lines), fontsize=7, x=0.01, ha="left", color="#444444")
