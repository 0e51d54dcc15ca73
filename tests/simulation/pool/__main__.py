"""Runs schedules of complete pools: `python -m tests.simulation.pool fuzz` and `... replay NUMBER`."""

from __future__ import annotations

import argparse
import os
import sys
import time

from holdfast.errors import EXIT_DONE, EXIT_FAILED
from tests.simulation.pool.pool_cluster import PoolCluster
from tests.simulation.pool.pool_fuzzing import fuzz_pools
from tests.simulation.pool.pool_plans import pool_plan


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code, which is 0 if every schedule passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.pool", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fuzz = commands.add_parser("fuzz", help="run schedules and print the failed ones")
    fuzz.add_argument("--schedules", type=int, default=5000, help="number of schedules (default: 5000)")
    fuzz.add_argument("--first", type=int, help="number of the first schedule (default: random)")
    fuzz.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="number of parallel processes"
    )
    one = commands.add_parser("replay", help="run one schedule and print its events")
    one.add_argument("number", type=int, help="the schedule's number")
    options = parser.parse_args(arguments)
    if options.command == "replay":
        return _replay(options.number)
    first = options.first if options.first is not None else int.from_bytes(os.urandom(5), "big")
    since = time.monotonic()
    tally = fuzz_pools(range(first, first + max(1, options.schedules)), max(1, options.processes))
    wall_s = time.monotonic() - since
    print(f"{tally.schedules} schedules in {wall_s:.0f} s; {tally.grants} grants, {tally.moved} of them ended,")
    print(f"{tally.recalled} nodes recalled from jobs, {tally.waited} granted as standbys; {len(tally.failed)} failed")
    for number, why in list(tally.failed.items())[:20]:
        print(f"FAILED: python -m tests.simulation.pool replay {number}: {why}")
    return EXIT_FAILED if tally.failed else EXIT_DONE


def _replay(number: int) -> int:
    plan = pool_plan(number)
    print(plan)
    cluster = PoolCluster(plan)
    try:
        cluster.run()
    finally:
        print(*cluster.world.story, sep="\n")
        print(*cluster.world.disk.journal, sep="\n")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
