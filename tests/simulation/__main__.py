"""`python -m tests.simulation replay NUMBER`, `... fuzz`, `... writes` and `... one`."""

from __future__ import annotations

import argparse
import sys
import time

from holdfast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from tests.simulation.cluster import SimCluster
from tests.simulation.families.large_plans import plan_of_size
from tests.simulation.faults.plans import FaultPlan
from tests.simulation.invariants import InvariantError
from tests.simulation.schedules.enumeration import FAMILIES, Schedule
from tests.simulation.schedules.every_write import writes
from tests.simulation.schedules.fuzzing import fuzz
from tests.simulation.schedules.shrinking import failure, shrunk
from tests.simulation.world import START, Parts

#: of one job of any size: the least and the default of each number, and what it is
_SIZES = {
    "nodes": (1, 1024, "how many there are"),
    "steps": (1, 100, "how many are trained"),
    "faults": (0, 20, "how many strike, one after the other"),
    "seed": (0, 1, "the same one gives the same run"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands; return its exit code, 0 where every schedule held."""
    options = _parser().parse_args(arguments)
    if wrong := _wrong(options):
        print(wrong, file=sys.stderr)
        return EXIT_BAD_INPUT
    if options.command == "fuzz":
        families = tuple(options.family or FAMILIES)
        return EXIT_DONE if fuzz(options.seconds, families, options.processes, options.schedules) else EXIT_FAILED
    if options.command == "writes":
        return EXIT_DONE if writes(options.schedules, options.seed, options.processes) else EXIT_FAILED
    if options.command == "one":
        return one(plan_of_size(options.seed, options.nodes, options.steps, options.faults))
    schedule = Schedule(number=options.number, write=options.write, power_cut=options.power_cut)
    return replay(shrunk(schedule.plan) if options.small else schedule.plan)


def _wrong(options: argparse.Namespace) -> str:
    """Say which option cannot be, and what to give instead; "" where all is well."""
    if options.command == "replay" and not any(options.number in numbers for numbers in FAMILIES.values()):
        known = ", ".join(f"{name} {numbers.start}..{numbers.stop - 1}" for name, numbers in FAMILIES.items())
        return f"no schedule has the number {options.number}; there are {known}"
    if options.command == "replay" and options.write < 0:
        return f"--write {options.write}: give a number from 1 on, or 0 for none"
    if options.command == "replay" and options.power_cut and not options.write:
        return "--power-cut needs --write: it comes before that write"
    if options.command == "fuzz" and options.schedules < 0:
        return f"--schedules {options.schedules}: give a number from 1 on, or 0 to run for --seconds"
    if options.command == "fuzz" and options.seconds <= 0:
        return f"--seconds {options.seconds:g}: give a time above 0"
    if options.command == "writes" and options.schedules < 1:
        return f"--schedules {options.schedules}: give a number from 1 on"
    if options.command == "one":
        wrong = (name for name, (least, *_) in _SIZES.items() if getattr(options, name) < least)
        return next(
            (f"--{name} {getattr(options, name)}: give a number from {_SIZES[name][0]} on" for name in wrong), ""
        )
    if options.command != "replay" and options.processes < 0:
        return f"--processes {options.processes}: give a number from 1 on, or 0 for one per core"
    return ""


def replay(plan: FaultPlan, parts: Parts | None = None) -> int:
    """Run a plan, print its story; return the exit code."""
    print(plan)
    cluster = SimCluster(plan, parts, keep_trace=True)
    end, code = "", EXIT_FAILED
    try:
        end, code = str(cluster.run()), EXIT_DONE
    except InvariantError as error:
        end = str(error).splitlines()[0]
    finally:  # whatever else is raised is seen beneath the story
        print(*cluster.world.story or (), end, sep="\n")
    return code


def one(plan: FaultPlan) -> int:
    """Run one plan, print what it took; return the exit code."""
    cluster, since, since_cpu = SimCluster(plan), time.monotonic(), time.process_time()
    how = failure(cluster)
    wall_s, cpu_s = time.monotonic() - since, time.process_time() - since_cpu
    virtual_s, struck = cluster.world.timeline.now - START, cluster.injector.seen.total()
    said = f"{plan.nodes} nodes, {plan.steps} steps, {struck} of {len(plan.faults)} faults struck"
    print(f"{said}, {virtual_s:.1f} s simulated")
    print(f"{wall_s:.1f} s, {cpu_s:.1f} s of one core; {how or cluster.ended}")
    return EXIT_FAILED if how else EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("replay", help="run one schedule and print its story")
    one.add_argument("number", type=int, help="the schedule's number")
    one.add_argument("--write", type=int, default=0, help="the coordinator dies before this write as well")
    one.add_argument("--power-cut", action="store_true", help="and its machine with it")
    one.add_argument("--small", action="store_true", help="leave out what it does not need to fail, first")
    fresh = commands.add_parser("fuzz", help="run fresh schedules, print those that fail")
    fresh.add_argument("--seconds", type=float, default=60.0, help="for how long (default: 60)")
    fresh.add_argument(
        "--schedules", type=int, default=0, help="how many, however long it takes (default: for --seconds)"
    )
    fresh.add_argument("--family", action="append", choices=list(FAMILIES), help="only these (default: all)")
    every = commands.add_parser("writes", help="kill the coordinator at every single write of schedules")
    every.add_argument("--schedules", type=int, default=200, help="of how many (default: 200)")
    every.add_argument("--seed", type=int, help="which random ones come after those of one failure (default: fresh)")
    single = commands.add_parser("one", help="run one job of any size, with faults all along its way")
    for name, (_, default, said) in _SIZES.items():
        single.add_argument(f"--{name}", type=int, default=default, help=f"{said} (default: {default})")
    for many in (fresh, every):
        many.add_argument("--processes", type=int, default=0, help="how many at a time (default: one per core)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
