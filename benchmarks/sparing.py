"""Measure the speed of the sparing planner, and compare the figures of the sparing paper with ours.

`make bench-sparing` prints:
* 100,000 (MTBF, MTTR, strategy) evaluations, each with its own search for the best spares, on one core;
* a Monte Carlo of 1,024 blocks x 1 year x 100 replications;
* Figure 6: simulated and closed-form CETT, for one and for two repair processes, with 0 and 8 spare GPUs;
* Figures 2-5: the share of the plane on which each statement of section 4.3 holds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from holdfast.planner.reliability.monte_carlo.estimate import SimulationSettings, estimate, simulate_strategy
from holdfast.planner.reliability.monte_carlo.validation import compare_repair_mixes
from holdfast.planner.reliability.sparing.case import SparingCase, SparingStrategy, scaled_failures
from holdfast.planner.reliability.sparing.evaluation import evaluate, evaluate_strategy
from holdfast.planner.reliability.sparing.reference import STATEMENTS, catalina
from holdfast.planner.reliability.sparing.sensitivity import SCENARIOS, sensitivity_map

FIGURE_6_STRATEGIES = (SparingStrategy(block_gpus=72, spare_gpus=0), SparingStrategy(block_gpus=72, spare_gpus=8))


def print_timing(what: str, runs: int, work: Callable[[], object]) -> None:
    """Print median and range of the wall and processor seconds of `work`."""
    clock: list[float] = []
    processor: list[float] = []
    for _ in range(runs):
        start, used = time.perf_counter(), time.process_time()
        work()
        clock.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    parts = [
        f"{name} {statistics.median(seconds):.2f} s ({min(seconds):.2f} .. {max(seconds):.2f})"
        for name, seconds in (("clock", clock), ("processor", processor))
    ]
    print(f"{what}: {', '.join(parts)}; medians of {runs} runs", flush=True)


def one_zone(case: SparingCase) -> SparingCase:
    """Return Figure 6's cluster: one zone of 1,024 racks, no placement."""
    return replace(case, cluster=replace(case.cluster, zones=1, racks_per_zone=1024), placement=None)


def bench_evaluations(runs: int) -> None:
    """Time 6 strategies at 16,667 points: 100,002 evaluations."""
    rng = np.random.default_rng(0)
    mtbf, mttr = (10 ** rng.uniform(low, high, 16_667) for low, high in ((3, 5), (-1, 2)))
    case = catalina()
    varied = replace(case, failures=scaled_failures(case.failures, mtbf, mttr))
    print_timing("100,002 (MTBF, MTTR, strategy) evaluations", runs, lambda: evaluate(varied))


def bench_monte_carlo(runs: int) -> None:
    """Time 1,024 blocks x 8,760 h x 100 replications, without and with spare trays."""
    case, settings = one_zone(catalina()), SimulationSettings(replications=100, hours=8760.0, seed=1)
    for strategy in FIGURE_6_STRATEGIES:
        spares = int(evaluate_strategy(case, strategy).spare_blocks)
        print_timing(
            f"Monte Carlo, 1,024 blocks of {strategy.label} x 1 year x 100 replications",
            runs,
            partial(simulate_strategy, case, strategy, spares, settings),
        )


def figure_6(replications: int) -> None:
    """Print simulated and closed-form CETT."""
    print(f"\nFigure 6: CETT, {replications} replications of a year, 99 % intervals; repairs of 1 h and 48 h")
    print(f"{'strategy':9} {'repairs':28} {'closed':>8} {'simulated':>10} {'+-':>8} {'gap':>8} {'inside':>7}")
    case = one_zone(catalina())
    settings = SimulationSettings(replications=replications, hours=8760.0, seed=6)
    for strategy in FIGURE_6_STRATEGIES:
        closed = evaluate_strategy(case, strategy)
        simulated = simulate_strategy(case, strategy, int(closed.spare_blocks), settings)
        rows = [("one process, 24 h", float(closed.cett), estimate(simulated.cett))]
        epsilons = tuple(np.linspace(0.0, 1.0, 11).round(1).tolist())
        for row in compare_repair_mixes(
            case, strategy, settings, epsilons=epsilons, mttr_auto_hours=1.0, mttr_ticket_hours=48.0
        ):
            rows.append((row.assumptions, row.closed_form, row.cett))
        for name, expected, found in rows:
            gap, inside = found.mean / expected - 1.0, "yes" if found.contains(expected) else "no"
            print(
                f"{strategy.label:9} {name:28} {expected:8.5f} {found.mean:10.5f} {found.high - found.mean:8.5f} "
                f"{100 * gap:+7.3f}% {inside:>7}"
            )


def figures_2_to_5(points: int) -> None:
    """Print the share of the plane on which each statement holds."""
    print(f"\nSection 4.3 on {points} x {points} points of 1e3..1e5 h tray MTBF, 0.1..100 h MTTR")
    mtbf, mttr = np.geomspace(1e3, 1e5, points), np.geomspace(0.1, 100.0, points)
    maps = [sensitivity_map(catalina(), scenario, mtbf, mttr) for scenario in SCENARIOS]
    for number, one in zip((2, 3, 4, 5), maps, strict=True):
        shares = ", ".join(
            f"{strategy.label} {100 * share:.1f} %"
            for strategy, share in zip(one.strategies, one.shares, strict=True)
            if share > 0
        )
        print(f"Figure {number} ({one.scenario.name}): {shares}")
    print(f"{'':60} {'of plane':>9} {'of its part':>12}")
    for statement in STATEMENTS:
        one = maps[statement.figure - 2]
        holds, part = statement.holds(one), statement.part(one)
        text = f"Figure {statement.figure}: {statement.text}"
        print(f"{text:60} {100 * holds.mean():8.1f}% {100 * holds[part].mean():11.1f}%")
    before, after = (np.isin(one.best, [1, 3, 5]) for one in maps[1:3])
    kept = "contains" if (after | ~before).all() else "does not contain"
    print(
        f"Figure 4: the region with spare trays grows from {100 * before.mean():.1f} % to {100 * after.mean():.1f} % "
        f"and {kept} the former one"
    )


def main() -> None:
    """Run everything, or only the timings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each timing")
    parser.add_argument("--replications", type=int, default=100, help="replications of Figure 6's simulations")
    parser.add_argument("--points", type=int, default=200, help="points along each axis of Figures 2-5")
    arguments = parser.parse_args()
    bench_evaluations(arguments.runs)
    bench_monte_carlo(arguments.runs)
    figure_6(arguments.replications)
    figures_2_to_5(arguments.points)


if __name__ == "__main__":
    main()
