"""Unicron, Figures 9 and 10: transitions after a lost node, one job's throughput, and six jobs' WAF on 128 GPUs.

The text of the paper has no numbers for these figures. Other systems are drawn as stated in
`planner/fleet/pool/systems.py`. 9: GPT-3 7B. 10a, 10b (and 4): the model of T(t, x) on which all figures here are
based; it assumes that holdfast and Megatron train equally fast. 10c: the five cases of Table 3 with single GPUs as in
the paper; our plan, which keeps T_necessary, and the three baselines (equally, by weight, by model size). Nothing is
random.

    python benchmarks/unicron/figures_9_10.py [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
from evaluation import COLOURS, GPUS, NODES, make_parser, run_unicron_figure, write_assumptions
from lazarus.drawing import draw_bars, make_sheet, save

from holdfast.planner.fleet.pool.gpt_tasks import MODELS, PEAK, TABLE_3, GptModel, estimate_steps_on_gpus_s
from holdfast.planner.fleet.pool.outages import MARKS
from holdfast.planner.fleet.pool.systems import SYSTEMS, list_assumptions
from holdfast.planning.waf.plan import best_plan, price_division
from holdfast.planning.waf.task import Task

SYSTEMS_9 = ("waf", "bamboo", "oobleck", "varuna", "megatron-spare")


def gpu_task(name: str, model: GptModel, weight: float) -> Task:
    """Return a job in units of GPUs; it keeps the smallest number that can hold it (T_necessary)."""
    seconds = estimate_steps_on_gpus_s(model, GPUS)
    rates = [0.0, *(0.0 if step == inf else model.flop * model.batch / step for step in seconds)]
    least = next(held for held, rate in enumerate(rates) if rate)
    return Task(name=name, throughput=np.array(rates), weight=weight, least=least, floor=least)


def apportion(shares: Sequence[float], units: int) -> list[int]:
    """Return integers in proportion to shares, by the largest remainders."""
    exact = [units * share / sum(shares) for share in shares]
    sizes = [int(part) for part in exact]
    order = sorted(range(len(shares)), key=lambda at: sizes[at] - exact[at])
    for at in order[: units - sum(sizes)]:
        sizes[at] += 1
    return sizes


def case_of(case: int) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Return WAF in PFLOP/s and GPUs by strategy."""
    sizes, weights = TABLE_3[case]
    tasks = [
        gpu_task(f"{size}-{place}", MODELS[size], weight)
        for place, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    plan = best_plan(tasks, GPUS, 1.0)
    ways = {
        "holdfast": [plan.sizes[task.name] for task in tasks],
        "equally": apportion([1.0] * len(tasks), GPUS),
        "weighted": apportion(weights, GPUS),
        "sized": apportion([MODELS[size].parameters for size in sizes], GPUS),
    }
    return {name: price_division(tasks, way, GPUS, 1.0).waf / 1e15 for name, way in ways.items()}, ways


def draw_transitions(axes: Any) -> None:
    """Draw Figure 9: seconds from the detection of a lost node to training again."""
    marks, held = (0.5,) * MARKS, range(2, NODES + 1)
    print("Figure 9: seconds from the detection of a lost node to training again, GPT-3 7B, 16 to 128 GPUs")
    for place, name in enumerate(SYSTEMS_9):
        seconds = [SYSTEMS[name].times.loss_cost(nodes, marks).resume_s for nodes in held]
        # Bamboo and Oobleck are assumed to be equal. The wider line remains visible beneath the other.
        style = {"linewidth": 1.4 + 4.0 * (name == "bamboo"), "markersize": 3, "color": COLOURS[name]}
        axes.plot([8 * nodes for nodes in held], seconds, marker="o", label=name, zorder=place + 2, **style)
        print(f"  {name:16}{seconds[0]:8.1f} .. {seconds[-1]:.1f}")
    axes.set_yscale("log")
    axes.set_title("9: transition after a lost node (others: assumed)", fontsize=10)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("seconds")
    axes.legend(fontsize=7, loc="center right")


def draw_throughput(axes: Any) -> None:
    """Draw Figure 10a: samples per second of the 7B model by GPUs."""
    model = MODELS["7B"]
    gpus = range(8, GPUS + 1, 8)
    steps = estimate_steps_on_gpus_s(model, GPUS)
    axes.plot(gpus, [model.batch / steps[held - 1] for held in gpus], marker="o", markersize=3, color=COLOURS["waf"])
    axes.set_title("10a: GPT-3 7B, as modelled (no numbers in the paper's text)", fontsize=10)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("samples/s")
    axes.set_ylim(bottom=0)


def draw_shares(axes: Any) -> None:
    """Draw Figures 4 and 10b: the share of the peak by number of GPUs, and with 64 of them."""
    print("Figure 10b: share of the peak FLOP/s on 64 GPUs, as modelled")
    gpus = range(8, GPUS + 1, 8)
    for model in MODELS.values():
        steps = estimate_steps_on_gpus_s(model, GPUS)
        shares = [model.flop * model.batch / steps[held - 1] / (held * PEAK) for held in gpus]
        axes.plot(gpus, [share or None for share in shares], marker="o", markersize=3, label=model.name)
        print(f"  {model.name:6}{shares[gpus.index(64)]:8.3f}")
    axes.set_title("4, 10b: share of the peak, as modelled", fontsize=10)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("FLOP/s, of the peak")
    axes.set_ylim(0, 0.7)
    axes.legend(fontsize=7)


def draw_cases(axes: Any) -> None:
    """Draw Figure 10c."""
    found = {case: case_of(case) for case in TABLE_3}
    print("Figure 10c: WAF of Table 3's cases on 128 GPUs, PFLOP/s, and each task's GPUs")
    for case, (wafs, ways) in found.items():
        for name, waf in wafs.items():
            print(f"  case {case}  {name:10}{waf:8.2f}  {ways[name]}")
        assert wafs["holdfast"] >= max(wafs.values()), "a baseline has a better plan than ours"
    groups = [f"case {case}" for case in found]
    names = list(found[1][0])
    draw_bars(axes, groups, {name: [wafs[name] for wafs, _ in found.values()] for name in names}, form="{:.1f}")
    axes.set_title("10c: WAF of six jobs (no numbers in the paper's text)", fontsize=10)
    axes.set_ylabel("weighted PFLOP/s")
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    for text in axes.texts:
        text.set_fontsize(5.5)
    axes.legend(fontsize=7, loc="upper left")


def make(options: argparse.Namespace) -> None:
    """Print and draw."""
    figure, panels = make_sheet(2, 2, width=7.0, height=3.9)
    draw_transitions(panels[0])
    draw_throughput(panels[1])
    draw_shares(panels[2])
    draw_cases(panels[3])
    figure.suptitle("Unicron, Figures 9 and 10 (and 4): the paper's text has none of their numbers", fontsize=12)
    said = [
        *list_assumptions([SYSTEMS[name] for name in SYSTEMS_9]),
        "9: ours: a failure in the middle of a step of 10 s; Megatron with a hot spare, as in the paper",
        "4, 10: FLOP/s by a model of ours (gpt_tasks.py states every number), the same for Megatron and holdfast",
        "10c: our plan keeps T_necessary, the fewest GPUs with enough memory; a baseline's job below that counts 0",
    ]
    write_assumptions(figure, said, width=180)
    save(figure, options.out, "figures_9_10")


if __name__ == "__main__":
    sys.exit(run_unicron_figure(make, make_parser(__doc__).parse_args()))
