"""Explores all variants, or the named ones, and reports unexpected verdicts.

`python tests/exploration/run_exploration.py [--deep] [--way] [--minutes M] [NAME ...]`
"""

from __future__ import annotations

import argparse
import sys

from search import HOLDS, OPEN, Found, explore
from variants import VARIANTS, Variant


def is_as_expected(variant: Variant, found: Found) -> bool:
    """Return whether a safe variant held, as far as it was explored, or a broken one was caught."""
    return (found.verdict in (HOLDS, OPEN)) == variant.is_safe


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Explore the protocol of a planned move, exhaustively.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only variants with one of these in their names")
    parser.add_argument("--deep", action="store_true", help="also variants that take minutes, or an hour")
    parser.add_argument("--way", action="store_true", help="show the shortest path to each finding")
    parser.add_argument("--minutes", type=float, default=60, help="limit per variant (default: 60)")
    options = parser.parse_args(arguments)
    wrong = 0
    for variant in VARIANTS:
        name = variant.rules.name
        if (variant.deep and not options.deep) or (options.names and not any(one in name for one in options.names)):
            continue
        found = explore(variant.rules, seconds=options.minutes * 60)
        print(found, flush=True)
        if options.way or not is_as_expected(variant, found):
            print(*(f"    {label}" for label in found.way), sep="\n", flush=True)
        wrong += not is_as_expected(variant, found)
    print("all verdicts are as expected" if not wrong else f"{wrong} verdicts are not as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
