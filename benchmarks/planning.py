"""Measure how long planning takes on one core.

1. From loads to a migration (allocation, placement, recovery, migration after a loss of nodes): 58 layers with 256
   experts on 128 and on 10 nodes of 32 slots; 12 layers with 16 experts on 10 nodes of 6 slots.
2. One rank's share of a token dispatch, row and column, for 1,024 ranks and 256 experts.
3. The dispatch schemes: time to compute a rank's share, and load balance over the ranks.
4. The assignment of roles to nodes: optimal compared with greedy, and which one is used.

Times are processor time of this process: on a shared machine, wall time includes other processes. The calibration at
the start never changes, so that figures of different machines and times can be compared relative to it.

    OMP_NUM_THREADS=1 python benchmarks/planning.py [--runs 11] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.planning import (
    Allocation,
    DispatchScheme,
    Interval,
    NodeInterval,
    PlacementProblem,
    Proportional,
    allocate,
    as_slots,
    dispatch_schedule,
    plan_migration,
    recovery_curve,
    schemes,
    strategy_named,
)
from holdfast.planning.moving.migration import OPTIMAL_UP_TO_NODES, greedy_roles
from holdfast.planning.solvers import best_assignment


def time_runs(run: Callable[[], object], runs: int) -> list[float]:
    """Return milliseconds of processor time of *runs* runs, after one uncounted run."""
    run()
    times: list[float] = []
    for _ in range(runs):
        began = time.process_time()
        run()
        times.append(1e3 * (time.process_time() - began))
    return times


def print_result(name: str, times: list[float], asked: float | None, notes: str = "") -> dict[str, Any]:
    """Print and return one result."""
    low, middle, high = min(times), float(np.median(times)), max(times)
    goal = "" if asked is None else f"  asked <= {asked:g}"
    print(f"  {name:58s} median {middle:8.2f} ms  ({low:.2f} .. {high:.2f}, {len(times)} runs){goal}  {notes}")
    return {"name": name, "median_ms": middle, "min_ms": low, "max_ms": high, "runs": len(times), "asked_ms": asked}


def calibration(runs: int) -> list[dict[str, Any]]:
    """Time fixed work that is unrelated to planning, as a reference for the current speed of this machine."""
    numbers = np.random.default_rng(0).integers(0, 1 << 40, (1024, 1024))
    rows = numbers[:64]

    def count() -> int:
        total = 0
        for number in range(100_000):
            total += number & 7
        return total

    print("Calibration, fixed work:")
    return [
        print_result("numpy: sum of 8 MiB of int64", time_runs(numbers.sum, runs), None),
        print_result(
            "numpy: stable order of 64 x 1,024 int64",
            time_runs(lambda: rows.argsort(axis=1, kind="stable"), runs),
            None,
        ),
        print_result("Python: 100,000 rounds of a loop", time_runs(count, runs), None),
    ]


def skewed_loads(layers: int, experts: int, seed: int) -> np.ndarray:
    """Return token counts as skewed as the recorded ones: a few hot experts, many cold ones."""
    rng = np.random.default_rng(seed)
    return (rng.pareto(1.2, (layers, experts)) * 1000).astype(np.int64)


def planning(nodes: int, slots: int, experts: int, layers: int, strategy: str, runs: int) -> list[dict[str, Any]]:
    """Time each stage and their sum; the migration follows the loss of two nodes that are replaced."""
    per_node = as_slots(slots, nodes)
    before, after = (
        skewed_loads(layers, experts, 1),
        skewed_loads(layers, experts, 1) + skewed_loads(layers, experts, 2) // 10,
    )
    placer = strategy_named(strategy)

    def allot(loads: np.ndarray) -> Allocation:
        allocation = allocate(loads, per_node, fault_threshold=2)
        assert isinstance(allocation, Allocation)
        return allocation

    def place(allocation: Allocation, held: np.ndarray | None) -> np.ndarray:
        # the same call as in `make_plan`
        problem = PlacementProblem(
            replicas=allocation.replicas,
            slots=per_node,
            fault_threshold=allocation.fault_threshold.given,
            previous=held,
            loads=allocation.tokens.astype(np.float64),
        )
        return placer.place(problem)

    held = place(allot(before), None)
    held[:, :, [0, nodes // 2]] = 0
    allocation = allot(after)
    counts = place(allocation, held)
    given = allocation.fault_threshold.given
    print(f"{nodes} nodes x {slots} slots, {experts} experts, {layers} layers, {strategy}, f = {given} (2 asked):")
    asked = 500.0 if nodes == 128 else 10.0
    moves = plan_migration(held, counts).expert_moves

    def everything() -> None:
        whole = allot(after)
        placed = place(whole, held)
        recovery_curve(placed)
        plan_migration(held, placed)

    return [
        print_result("allocation", time_runs(lambda: allot(after), runs), None),
        print_result("placement", time_runs(lambda: place(allocation, held), runs), None),
        print_result("recovery, joint over layers", time_runs(lambda: recovery_curve(counts), runs), None),
        print_result(
            "migration", time_runs(lambda: plan_migration(held, counts), runs), None, f"{moves} experts moved"
        ),
        print_result("all four", time_runs(everything, runs), asked),
    ]


def row_and_column(tokens: np.ndarray, replicas: np.ndarray, scheme: DispatchScheme, rank: int) -> None:
    """Compute the parts of a dispatch that one rank needs."""
    schedule = dispatch_schedule(tokens, replicas, scheme)
    schedule.send_row(rank)
    schedule.receive_column(rank)


def dispatch(runs: int) -> list[dict[str, Any]]:
    """Time one rank's row and column for 1,024 ranks x 256 experts."""
    experts, ranks, slots = 256, 1024, 6
    rng = np.random.default_rng(0)
    tokens = rng.multinomial(4096, rng.dirichlet(np.full(experts, 0.3)), size=ranks).T.astype(np.int64)
    allocation = allocate(tokens.sum(axis=1)[None], as_slots(slots, ranks), fault_threshold=2)
    assert isinstance(allocation, Allocation)
    problem = PlacementProblem(replicas=allocation.replicas, slots=as_slots(slots, ranks), fault_threshold=2)
    replicas = strategy_named("mro").place(problem)[0]
    print(f"Dispatch, {ranks} ranks x {experts} experts, one rank's row and column:")

    def share(scheme: DispatchScheme) -> None:
        row_and_column(tokens, replicas, scheme, 517)

    near = NodeInterval(np.arange(ranks) // 8)
    return [
        print_result("interval", time_runs(lambda: share(Interval()), runs), 20.0),
        print_result("interval, same node first (8 ranks a node)", time_runs(lambda: share(near), runs), 20.0),
        print_result("proportional (Algorithm 1)", time_runs(lambda: share(Proportional()), runs), 20.0),
    ]


def balance(runs: int) -> list[dict[str, Any]]:
    """Compare the schemes: time of one rank's row and column, and load of the busiest rank relative to the mean.

    The placement follows loads from which the tokens have drifted, as between two rebalances.
    """
    print("Dispatch schemes, one rank's row and column; the busiest rank's tokens over the mean:")
    results: list[dict[str, Any]] = []
    for ranks, experts, slots in ((4, 8, 6), (10, 16, 6), (32, 64, 6), (128, 256, 6)):
        rng = np.random.default_rng(ranks)
        popular = rng.dirichlet(np.full(experts, 0.5))
        per_rank = as_slots(slots, ranks)
        allocation = allocate((popular * 1e6).astype(np.int64)[None], per_rank, fault_threshold=2)
        assert isinstance(allocation, Allocation)
        problem = PlacementProblem(
            replicas=allocation.replicas, slots=per_rank, fault_threshold=allocation.fault_threshold.given
        )
        replicas = strategy_named("mro").place(problem)[0]
        drifted = popular * rng.uniform(0.5, 1.5, experts)
        tokens = rng.multinomial(4096, drifted / drifted.sum(), size=ranks).T.astype(np.int64)
        for scheme in schemes().values():
            times = time_runs(lambda scheme=scheme, t=tokens, r=replicas: row_and_column(t, r, scheme, 1), runs)
            capacities = dispatch_schedule(tokens, replicas, scheme).capacities
            busiest = float(capacities.sum(axis=0).max() * ranks / tokens.sum())
            name = f"{scheme.name}, {ranks} ranks x {experts} experts"
            results.append(print_result(name, times, None, f"busiest {busiest:.3f}x the mean"))
            results[-1]["busiest_over_mean"] = busiest
    return results


def assignment(runs: int) -> list[dict[str, Any]]:
    """Time the role assignment by number of nodes."""
    print(f"Roles to nodes (optimal up to {OPTIMAL_UP_TO_NODES} nodes):")
    results: list[dict[str, Any]] = []
    for nodes in (128, 256, 512, 1024):
        kept = np.random.default_rng(nodes).integers(0, 200, (nodes, nodes)).astype(np.float64)
        for name, solve in (("optimal", best_assignment), ("greedy", greedy_roles)):
            share = kept[np.arange(nodes), solve(kept)].sum() / kept[np.arange(nodes), best_assignment(kept)].sum()
            times = time_runs(lambda solve=solve, kept=kept: solve(kept), max(runs // 3, 3))
            results.append(print_result(f"{name}, {nodes} nodes", times, None, f"keeps {share:.1%} of the optimum"))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    results: dict[str, Any] = {"calibration": calibration(options.runs)}
    for strategy in ("mro", "best"):
        for size in ((128, 32, 256, 58), (10, 32, 256, 58), (10, 6, 16, 12)):
            results[f"{strategy} {size}"] = planning(*size, strategy, options.runs)
    results["dispatch"] = dispatch(options.runs)
    results["balance"] = balance(options.runs)
    results["assignment"] = assignment(options.runs)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
