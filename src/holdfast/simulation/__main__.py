"""`python -m holdfast.simulation replay NUMBER` and `... fuzz`."""

from __future__ import annotations

import argparse
import sys

from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from holdfast.simulation.cluster import Cluster, Parts
from holdfast.simulation.enumeration import FAMILIES, plan_of
from holdfast.simulation.faults import FaultPlan
from holdfast.simulation.fuzzing import fuzz
from holdfast.simulation.invariants import InvariantError
from holdfast.simulation.shrinking import shrunk


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code."""
    options = _parser().parse_args(arguments)
    if options.command == "fuzz":
        if options.seconds <= 0:
            print(f"--seconds {options.seconds:g}: give a time above 0", file=sys.stderr)
            return EXIT_BAD_INPUT
        families = tuple(options.family or FAMILIES)
        return EXIT_DONE if fuzz(options.seconds, families, options.processes) else EXIT_FAILED
    try:
        plan = plan_of(options.number)
    except ValueError as error:
        known = ", ".join(f"{name} {seeds.start}..{seeds.stop - 1}" for name, seeds in FAMILIES.items())
        print(f"{error}; there are {known}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return replay(shrunk(plan) if options.small else plan)


def replay(plan: FaultPlan, parts: Parts | None = None) -> int:
    """Run a plan, print its story; return the exit code."""
    print(plan)
    cluster = Cluster(plan, parts, keep_trace=True)
    end, code = "", EXIT_FAILED
    try:
        end, code = str(cluster.run()), EXIT_DONE
    except InvariantError as error:
        end = str(error).splitlines()[0]
    finally:  # whatever else is raised is seen beneath the story
        print(*cluster.story or (), end, sep="\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m holdfast.simulation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("replay", help="run one schedule and print its story")
    one.add_argument("number", type=int, help="the schedule's number")
    one.add_argument("--small", action="store_true", help="leave out what it does not need to fail, first")
    many = commands.add_parser("fuzz", help="run fresh schedules, print those that fail")
    many.add_argument("--seconds", type=float, default=60.0, help="for how long (default: 60)")
    many.add_argument("--family", action="append", choices=list(FAMILIES), help="only these (default: all)")
    many.add_argument("--processes", type=int, default=0, help="how many at a time (default: one per core)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
