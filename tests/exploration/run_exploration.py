"""Explores every variant, or those whose name contains an argument; says where something is not as it must be.

`python tests/exploration/run_exploration.py [--deep] [--way] [--minutes M] [NAME ...]`
"""

from __future__ import annotations

import argparse
import sys

from search import HOLDS, OPEN, Found, explore
from variants import VARIANTS, Variant


def is_as_expected(variant: Variant, found: Found) -> bool:
    """Tell whether a safe variant held (as far as it was seen), and a broken one was caught."""
    return (found.verdict in (HOLDS, OPEN)) == variant.is_safe


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Explore the protocol of a planned move, exhaustively.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only variants whose names contain one of these")
    parser.add_argument("--deep", action="store_true", help="also those that take minutes, or an hour")
    parser.add_argument("--way", action="store_true", help="show the shortest way to what was found")
    parser.add_argument("--minutes", type=float, default=60, help="cut a variant off after so many (default: 60)")
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
    print("all as it must be" if not wrong else f"{wrong} not as it must be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
