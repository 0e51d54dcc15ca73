"""Unicron, Figure 11: accumulated WAF of six jobs (Table 3, case 5) on 128 GPUs through failure traces a and b.

The traces are not published: each is drawn from the printed counts, SEEDS times. The paper prints Unicron's accumulated
WAF relative to the other systems. Both Megatron ratios are predictions without any fit. The efficiencies of Bamboo,
Oobleck and Varuna are not printed; they are fitted so that the mean ratios of trace a equal the paper's. Their ratios
for trace b are predictions. Trace b's repair times are not printed either: three readings are shown.

    python benchmarks/unicron/figure_11.py [--seeds 200] [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from evaluation import COLOURS, NODES, PAPERS_RATIOS, make_parser, run_unicron_figure, write_assumptions
from lazarus.drawing import make_sheet, save
from lazarus.setting import at_least

from holdfast.planner.fleet.pool.comparison import best_waf_without_failures, simulate_pool
from holdfast.planner.fleet.pool.gpt_tasks import make_table_3_jobs
from holdfast.planner.fleet.pool.outages import DAY_S, TRACE_A, TRACE_B, TraceDrawing, draw_trace
from holdfast.planner.fleet.pool.systems import SYSTEMS, HoldfastTimes, System, list_assumptions, with_efficiency
from holdfast.planning.arrays import FloatArray

CASE = 5
COMPARED = ("waf", "hit-only", "megatron-spare", "megatron", "bamboo", "oobleck", "varuna")
FITTED = ("bamboo", "oobleck", "varuna")
#: Readings of trace b's repairs.
READINGS = {
    "trace b": TRACE_B,
    "trace b, repairs 1/20 of trace a's": replace(TRACE_B, repair_s=(DAY_S / 20, 7 * DAY_S / 20)),
    "trace b, repairs as in trace a": replace(TRACE_B, repair_s=(DAY_S, 7 * DAY_S)),
}


@dataclass(frozen=True, slots=True)
class Totals:
    """Accumulated WAF `(seeds,)` of one kind of trace by system, as a share of the total without failures."""

    share: Mapping[str, FloatArray]
    #: Share of the six jobs' time in which they have fewer nodes than they need.
    short: Mapping[str, FloatArray]

    def ratio(self, name: str, efficiency: float = 1.0) -> FloatArray:
        """Return our total relative to another system's, `(seeds,)`."""
        return self.share["waf"] / (efficiency * self.share[name])


def simulate_totals(drawing: TraceDrawing, seeds: int, systems: Sequence[System]) -> Totals:
    """Run all systems through the same traces."""
    tasks = make_table_3_jobs(CASE, NODES)
    most = best_waf_without_failures(tasks, NODES) * drawing.seconds
    share = {system.name: np.zeros(seeds) for system in systems}
    short = {system.name: np.zeros(seeds) for system in systems}
    for seed in range(seeds):
        trace = draw_trace(drawing, NODES, seed)
        for system in systems:
            lived = simulate_pool(system, tasks, trace, machine=False)
            share[system.name][seed] = lived.total / most
            short[system.name][seed] = sum(lived.short_s.values()) / (len(tasks) * drawing.seconds)
    return Totals(share, short)


def fit_efficiencies(totals: Totals) -> dict[str, float]:
    """Return the efficiencies with which the mean ratios of trace a equal the paper's."""
    paper = PAPERS_RATIOS["trace a"]
    return {name: float(totals.ratio(name).mean()) / paper[name] for name in FITTED}


def show(name: str, totals: Totals, efficiencies: Mapping[str, float], paper: Mapping[str, float]) -> None:
    """Print one kind of trace."""
    print(f"{name}\n  {'':16}{'share':>8}{'short':>8}{'ratio':>8}{'5 %':>8}{'95 %':>8}{'paper':>8}{'error':>8}")
    for system in totals.share:
        ratio = totals.ratio(system, efficiencies.get(system, 1.0))
        low, high = np.quantile(ratio, [0.05, 0.95])
        share = float(totals.share[system].mean()) * efficiencies.get(system, 1.0)
        line = f"  {system:16}{share:8.4f}{totals.short[system].mean():8.4f}{ratio.mean():8.3f}{low:8.3f}{high:8.3f}"
        papers = paper.get(system)
        print(line + (f"{papers:8.1f}{ratio.mean() / papers - 1:+8.1%}" if papers else ""))


def print_background_changes(seeds: int, found: Mapping[str, Totals]) -> None:
    """Print our total if a planned change cost as much as a measured arrival, with groups built in the background."""
    join_s = HoldfastTimes().case.recovery.join_s
    times = HoldfastTimes(changed_s=join_s)
    for name, drawing in (("trace a", TRACE_A), ("trace b", TRACE_B)):
        totals = simulate_totals(drawing, seeds, [replace(SYSTEMS["waf"], times=times)])
        before, after = (float(one.share["waf"].mean()) for one in (found[name], totals))
        print(f"{name}: if a planned change cost {join_s} s, our total would be multiplied by {after / before:.4f}")


def draw_lines(axes: Any, title: str, drawing: TraceDrawing, systems: Sequence[System]) -> None:
    """Draw WAF over time on the first trace."""
    tasks, trace = make_table_3_jobs(CASE, NODES), draw_trace(drawing, NODES, 0)
    for system in systems:
        steps = simulate_pool(system, tasks, trace, machine=False).steps
        at = [time / DAY_S for time, _ in steps] + [trace.seconds / DAY_S]
        rates = [rate / 1e15 for _, rate in steps]
        axes.step(at, [*rates, rates[-1]], where="post", color=COLOURS[system.name], linewidth=0.9, label=system.name)
    axes.set_title(f"{title}: WAF on one trace (seed 0)", fontsize=10)
    axes.set_xlabel("days")
    axes.set_ylabel("weighted PFLOP/s")
    # Leave room for the legend above the lines.
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    axes.legend(fontsize=7, loc="upper center", ncols=len(systems))


def draw_ratios(
    axes: Any, title: str, totals: Totals, efficiencies: Mapping[str, float], paper: Mapping[str, float]
) -> None:
    """Draw our accumulated WAF relative to the others, and the paper's values."""
    names = [name for name in totals.share if name != "waf"]
    for place, name in enumerate(names):
        ratio = totals.ratio(name, efficiencies.get(name, 1.0))
        low, high = np.quantile(ratio, [0.05, 0.95])
        mean = float(ratio.mean())
        axes.bar(place, mean, 0.6, color=COLOURS[name])
        axes.plot([place, place], [low, high], color="black", linewidth=1.2)
        axes.annotate(f"{mean:.3f}", (place, 0.06), ha="center", fontsize=8, color="white")
        if name in paper:
            axes.plot([place], [paper[name]], "kx", markersize=8, label="the paper" if name == "megatron" else None)
            above = (place, max(paper[name], high))
            said = f"paper {paper[name]}"
            axes.annotate(said, above, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.axhline(1.0, color="#777777", linewidth=0.8)
    labels = [f"{name}\n(fit: {efficiencies[name]:.3f})" if name in efficiencies else name for name in names]
    axes.set_xticks(range(len(names)), labels, fontsize=7)
    axes.set_title(title, fontsize=9)
    axes.set_ylabel("accumulated WAF, ours / theirs", fontsize=8)
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.legend(fontsize=8, loc="upper left")


def make(options: argparse.Namespace) -> None:
    """Simulate, print and draw."""
    systems = [SYSTEMS[name] for name in COMPARED]
    found = {"trace a": simulate_totals(TRACE_A, options.seeds, systems)}
    efficiencies = fit_efficiencies(found["trace a"])
    found |= {name: simulate_totals(drawing, options.seeds, systems) for name, drawing in READINGS.items()}
    for name, totals in found.items():
        paper = PAPERS_RATIOS[name.split(",")[0]]
        show(name, totals, efficiencies, paper)
    print_background_changes(options.seeds, found)
    below = {name: _count_below_hit_only(totals) for name, totals in found.items()}
    print("traces on which hit-only starves no job, and on how many of them ours is below it:", below)
    real = [with_efficiency(system, efficiencies.get(system.name, 1.0)) for system in systems]
    figure, panels = make_sheet(3, 2, width=6.0, height=3.9)
    papers = [system for system in real if system.name in ("waf", *PAPERS_RATIOS["trace a"])]
    draw_lines(panels[0], "trace a", TRACE_A, papers)
    draw_lines(panels[3], "trace b", TRACE_B, papers)
    many = f"{options.seeds} traces, mean and 5-95 %"
    places = {"trace a": 1, **dict(zip(READINGS, (4, 2, 5), strict=True))}
    for name, place in places.items():
        what = "fitted: the last three" if name == "trace a" else "predicted"
        title = f"{name} ({many}; {what})"
        draw_ratios(panels[place], title, found[name], efficiencies, PAPERS_RATIOS[name.split(",")[0]])
    figure.suptitle("Unicron, Figure 11: six jobs (Table 3, case 5) on 16 nodes of 8 GPUs, simulated", fontsize=12)
    said = [
        *list_assumptions(systems),
        "traces are drawn from their printed counts; repairs: 1 to 7 days in trace a; trace b's are not printed",
        "trace b without a suffix: as many nodes return as are lost",
        "jobs: FLOP/s by a model of ours (gpt_tasks.py); T_necessary: what memory needs",
        "our plans keep every job at T_necessary or above; the rule of section 7.5 may go below it for a hit job",
        "fit: efficiency of Megatron's, so that trace a's mean ratio is the paper's; Megatron's ratios are predictions",
    ]
    write_assumptions(figure, said)
    save(figure, options.out, "figure_11")


def _count_below_hit_only(totals: Totals) -> tuple[int, int]:
    fair = totals.short["hit-only"] == 0
    return int(fair.sum()), int((totals.share["waf"] < totals.share["hit-only"])[fair].sum())


if __name__ == "__main__":
    reader = make_parser(__doc__)
    reader.add_argument("--seeds", type=at_least(1), default=200, help="traces of each kind")
    sys.exit(run_unicron_figure(make, reader.parse_args()))
