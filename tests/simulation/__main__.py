"""Runs simulated jobs: `python -m tests.simulation replay NUMBER`, `... fuzz`, `... writes` and `... one`."""

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

#: The options of `one`: the minimum, the default and the help text of each.
_SIZES = {
    "nodes": (1, 1024, "number of nodes"),
    "steps": (1, 100, "number of steps"),
    "faults": (0, 20, "number of faults, one after another"),
    "seed": (0, 1, "random seed; the same seed gives the same run"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code, which is 0 if every schedule passed."""
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
    """Return a message about an invalid option, or "" if all options are valid."""
    if options.command == "replay" and not any(options.number in numbers for numbers in FAMILIES.values()):
        known = ", ".join(f"{name} {numbers.start}..{numbers.stop - 1}" for name, numbers in FAMILIES.items())
        return f"no schedule has the number {options.number}; the families are {known}"
    if options.command == "replay" and options.write < 0:
        return f"--write {options.write}: must be at least 1, or 0 for none"
    if options.command == "replay" and options.power_cut and not options.write:
        return "--power-cut needs --write: the power cut comes before that write"
    if options.command == "fuzz" and options.schedules < 0:
        return f"--schedules {options.schedules}: must be at least 1, or 0 to run for --seconds"
    if options.command == "fuzz" and options.seconds <= 0:
        return f"--seconds {options.seconds:g}: must be above 0"
    if options.command == "writes" and options.schedules < 1:
        return f"--schedules {options.schedules}: must be at least 1"
    if options.command == "one":
        wrong = (name for name, (least, *_) in _SIZES.items() if getattr(options, name) < least)
        return next((f"--{name} {getattr(options, name)}: must be at least {_SIZES[name][0]}" for name in wrong), "")
    if options.command != "replay" and options.processes < 0:
        return f"--processes {options.processes}: must be at least 1, or 0 for one per core"
    return ""


def replay(plan: FaultPlan, parts: Parts | None = None) -> int:
    """Run a plan and print its events; return the exit code."""
    print(plan)
    cluster = SimCluster(plan, parts, keep_trace=True)
    end, code = "", EXIT_FAILED
    try:
        end, code = str(cluster.run()), EXIT_DONE
    except InvariantError as error:
        end = str(error).splitlines()[0]
    finally:  # Any other exception is printed below the events.
        print(*cluster.world.story or (), end, sep="\n")
    return code


def one(plan: FaultPlan) -> int:
    """Run one plan and print its cost; return the exit code."""
    cluster, since, since_cpu = SimCluster(plan), time.monotonic(), time.process_time()
    how = failure(cluster)
    wall_s, cpu_s = time.monotonic() - since, time.process_time() - since_cpu
    virtual_s, struck = cluster.world.timeline.now - START, cluster.injector.seen.total()
    size = f"{plan.nodes} nodes, {plan.steps} steps, {struck} of {len(plan.faults)} faults struck"
    print(f"{size}, {virtual_s:.1f} s simulated")
    print(f"{wall_s:.1f} s, {cpu_s:.1f} s of one core; {how or cluster.ended}")
    return EXIT_FAILED if how else EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("replay", help="run one schedule and print its events")
    one.add_argument("number", type=int, help="the schedule's number")
    one.add_argument("--write", type=int, default=0, help="also crash the coordinator before this write")
    one.add_argument("--power-cut", action="store_true", help="crash its machine with it")
    one.add_argument("--small", action="store_true", help="shrink the schedule first, so that it still fails")
    fresh = commands.add_parser("fuzz", help="run new schedules and print the failed ones")
    fresh.add_argument("--seconds", type=float, default=60.0, help="time to run (default: 60)")
    fresh.add_argument(
        "--schedules",
        type=int,
        default=0,
        help="number of schedules, without a time limit (default: run for --seconds)",
    )
    fresh.add_argument("--family", action="append", choices=list(FAMILIES), help="only these families (default: all)")
    every = commands.add_parser("writes", help="kill the coordinator at every write of schedules")
    every.add_argument("--schedules", type=int, default=200, help="number of schedules (default: 200)")
    every.add_argument(
        "--seed", type=int, help="seed of the random schedules after the single-failure ones (default: random)"
    )
    single = commands.add_parser("one", help="run one job of any size, with faults throughout")
    for name, (_, default, text) in _SIZES.items():
        single.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    for many in (fresh, every):
        many.add_argument(
            "--processes", type=int, default=0, help="number of parallel processes (default: one per core)"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
