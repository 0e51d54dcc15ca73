"""Simulate eight weeks of a large pool: time of the allocation policy alone, and of the pool server's state machine.

There are 32 jobs (repeated from case 5 of Unicron's Table 3). Each node fails as often as in Unicron's trace a. Nodes
are divided by the policy `waf` alone, and again by the state machine that a pool server runs. Both must reach the same
total. Times are processor time of one core, and each change is handled when it happens. Beyond --whole nodes, the state
machine is timed on the first --changes changes only.

    python benchmarks/fleet_scale.py [--nodes 1024 4096] [--jobs 32] [--whole 1024] [--changes 20]
"""

from __future__ import annotations

import argparse
import time
from itertools import islice

from holdfast.errors import RefusedError
from holdfast.planner.fleet.pool.comparison import best_waf_without_failures, simulate_pool
from holdfast.planner.fleet.pool.divided_shares import DividedShares
from holdfast.planner.fleet.pool.gpt_tasks import make_mixed_jobs
from holdfast.planner.fleet.pool.machine_shares import MachineShares
from holdfast.planner.fleet.pool.outages import TRACE_A, FleetTrace, draw_trace, scale_drawing
from holdfast.planner.fleet.pool.systems import OWN, SYSTEMS
from holdfast.planner.fleet.pool.tasks import FleetTask


def time_machine(tasks: list[FleetTask], trace: FleetTrace, changes: int) -> tuple[float, float]:
    """Return the state machine's seconds to start and per change; check that it gives each node to the policy's job."""
    begun = time.process_time()
    machine = MachineShares("waf", tasks, trace.nodes, OWN.change_s)
    begin_s = time.process_time() - begun
    alone = DividedShares("waf", tasks, trace.nodes, OWN.change_s)
    spent_s = 0.0
    for outage in islice((one for one in trace.outages if one.what != "fault"), changes):
        begun = time.process_time()
        (machine.add_node if outage.what == "back" else machine.remove_node)(outage.node, outage.at)
        spent_s += time.process_time() - begun
        (alone.add_node if outage.what == "back" else alone.remove_node)(outage.node, outage.at)
        differ = [node for node in trace.nodes if machine.owner_of(node) != alone.owner_of(node)]
        assert not differ, f"the machine gives {differ[0]} to another job than its policy does"
    return begin_s, spent_s / changes


def time_eight_weeks(tasks: list[FleetTask], trace: FleetTrace, *, machine: bool) -> tuple[float, float]:
    """Return the seconds that eight weeks take, and the total that they achieve."""
    begun = time.process_time()
    lived = simulate_pool(SYSTEMS["waf"], tasks, trace, machine=machine)
    return time.process_time() - begun, lived.total


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument(
        "--whole", type=int, default=1024, help="nodes up to which the state machine runs all eight weeks"
    )
    parser.add_argument(
        "--changes", type=int, default=20, help="changes to time beyond that; 0 skips the state machine"
    )
    options = parser.parse_args()
    for nodes in options.nodes:
        tasks, trace = make_mixed_jobs(options.jobs, nodes), draw_trace(scale_drawing(TRACE_A, nodes), nodes, 0)
        spent_s, total = time_eight_weeks(tasks, trace, machine=False)
        share = total / (best_waf_without_failures(tasks, nodes) * trace.seconds)
        changes = trace.count("lost") + trace.count("back")
        print(f"{nodes} nodes, {options.jobs} jobs, 8 weeks, {trace.count('lost')} + {trace.count('fault')} failures:")
        print(f"  the policy alone: {spent_s:.1f} s; {spent_s / changes * 1e3:.1f} ms for each of {changes} changes")
        print(f"  share of the total without failures: {share:.4f}", flush=True)
        if nodes <= options.whole:
            spent_s, again = time_eight_weeks(tasks, trace, machine=True)
            assert again == total, f"the machine comes to {again}, its policy to {total}"
            print(f"  the pool's machine: {spent_s:.1f} s in all", flush=True)
        elif options.changes:
            try:
                begin_s, change_s = time_machine(tasks, trace, options.changes)
            except RefusedError as error:  # the reports of this many jobs on this many nodes exceed the pool's limit
                print(f"  the pool's machine refuses: {error}")
                continue
            print(
                f"  the pool's machine: {begin_s:.1f} s to begin, {change_s * 1e3:.0f} ms for each change", flush=True
            )


if __name__ == "__main__":
    main()
