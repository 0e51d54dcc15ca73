"""Lazarus, Figure 13: time of 5 million samples for DeepSeek-V3 on 256 to 1,024 H200s whose nodes are preempted.

SIMULATED. Shows job completion times relative to Lazarus (here to holdfast, which has the same policy), with 10 trials
and 95 % intervals. Layer times come from `perfmodel/dsv3_perfmodel.json` (shallowsim: H200, 8 per node with 8 NICs of
400 Gbit/s): the forward pass of a sequence, with tensor parallelism 8 outside the experts. As in the paper, each node
is preempted in each hour with a given probability. Each missing node is replaced with a probability drawn for each hour
uniformly from 0 to 1. Each GPU holds 4 expert replicas, so that an EP group is 64 GPUs, or 8 nodes.

The paper does not specify the following, so it is stated here. Sequences have 4,096 tokens, and each node has 32 of
them per step. Backward takes twice forward's computation and once its messages. Expert computation scales with the
busiest GPU's share of the tokens, the all-to-alls with the busiest node's. Dense gradients are reduced in the
background. A live recovery takes 60 s, a restart 180 s, a checkpoint 15 s (14 bytes per parameter, all NICs). Restarts
use the optimal checkpoint interval (Daly), live recoveries one hour. There is no padding, which makes the baselines
stronger than DeepSpeed's. f = 2.

The paper's routing (DeepSeek-V3 on ShareGPT) is not in the data. SUBSTITUTE: each of the 8 groups of 32 experts of a
layer gets the loads of a random SmartMoE layer (24 layers, 32 experts, recorded from iteration 2001 on), and the
experts are then shuffled. With `--zipf S`, the k-th hottest expert gets k^-S instead.

    python benchmarks/lazarus/figure_13.py [--data DIR] [--out DIR] [--trials 10] [--zipf S]
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from drawing import COLOURS, make_sheet, save
from modelled_job import Costs, Formation, ModelledJob, Policy
from perf_model import LayerTimes, PerfModel
from policies import Static, chunk_load
from setting import at_least, from_zero, make_parser, require_file, run_figure

from holdfast.planner.reliability.monte_carlo.estimate import Estimate, estimate
from holdfast.planning import Plan, as_slots, make_plan, split_over_workers, strategy_named
from holdfast.planning.arrays import FloatArray, IntArray
from holdfast.planning.availability import Batch, NodeEvent, Window
from holdfast.planning.balance.work import busiest_over_mean
from holdfast.planning.checkpointing import best_period

GPUS, REPLICAS = 8, 4
LAYERS, DENSE_LAYERS, EXPERTS, GROUPS = 58, 3, 256, 8
EP_NODES = EXPERTS // (GPUS * REPLICAS)
TOKENS, SEQUENCES, SAMPLES = 4096, 32, 5_000_000
RECONFIGURE_S, RESTART_S, SAVE_S = 60.0, 180.0, 15.0
HOUR = 3600.0
MOST_HOURS = 2000
FOR_EVER = 1 << 40
PROBABILITIES = (0.01, 0.05, 0.1, 0.15)
SIZES = (32, 64, 128)
NODES, PROBABILITY = 64, 0.05
#: Time of DS(FT) and of DS relative to Lazarus, by probability with 64 nodes, and by nodes at 0.05 (section 6.7).
PAPER_BY_PROBABILITY = {0.01: (2.9, 3.9), 0.15: (3.6, 14.5)}
PAPER_BY_NODES = {32: (2.9, 4.5), 128: (3.5, 10.6)}
NAMES = ("holdfast", "DS(FT)", "DS")
N = TypeVar("N", int, float)


def substitute(data: Path, seed: int = 0) -> IntArray:
    """Return tokens `(58, 256)` composed of recorded layers."""
    with np.load(require_file(data, Path("routing") / "smartmoe_24L32E.npz")) as archive:
        late = archive["tokens"][archive["iterations"] > 2000].astype(np.int64)
    rng = np.random.default_rng(seed)
    rows = [
        np.concatenate([late[rng.integers(len(late)), rng.integers(late.shape[1])] for _ in range(GROUPS)])
        for _ in range(LAYERS)
    ]
    return np.stack([rng.permutation(row) for row in rows])


def zipf(exponent: float, seed: int = 0) -> IntArray:
    """Return tokens `(58, 256)`: the k-th hottest expert of a layer gets k ** -exponent, in random order."""
    rng = np.random.default_rng(seed)
    share = 1e6 / np.arange(1, EXPERTS + 1) ** exponent
    return np.stack([rng.permutation(share) for _ in range(LAYERS)]).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The duration of a step, given the load of the busiest GPU and node relative to the mean."""

    times: LayerTimes

    def step_s(self, gpu: FloatArray, node: FloatArray) -> float:
        """Return a step's seconds; both arguments are `(L,)`."""
        return 1e-3 * SEQUENCES * (self._pass_ms(gpu, node, 1.0) + self._pass_ms(gpu, node, 2.0))

    def _pass_ms(self, gpu: FloatArray, node: FloatArray, compute: float) -> float:
        """Return the ms of one sequence's pass; messages overlap with computation, as in the source."""
        t = self.times
        before, routed = compute * (t.attention_tp + t.shared), compute * t.routed * gpu
        sparse = before + routed + np.maximum(0, t.combine * node - before) + np.maximum(0, t.dispatch * node - routed)
        return DENSE_LAYERS * compute * (t.attention_tp + t.dense / GPUS) + float(sparse.sum())


@dataclass(frozen=True, kw_only=True)
class Sized:
    """The elastic policy on any number of nodes; the placement depends on their number alone.

    Every loss that leaves enough slots is survived: with f = 2 and one loss at a time, no expert is lost.
    """

    pace: Pace
    loads: IntArray
    name: str = "holdfast"
    restarts_to_grow: bool = False
    known: dict[int, float] = field(default_factory=dict[int, float])

    def step_s(self, nodes: int) -> float:
        """Return a step's seconds on this many nodes."""
        if nodes not in self.known:
            slots = as_slots(GPUS * REPLICAS, nodes)
            plan = make_plan(self.loads, slots, fault_threshold=2, strategy=strategy_named("best"))
            assert isinstance(plan, Plan)
            tokens = self.loads.astype(np.float64)
            by_gpu = split_over_workers(plan.counts, np.full(nodes, GPUS))
            self.known[nodes] = self.pace.step_s(
                busiest_over_mean(by_gpu, tokens), busiest_over_mean(plan.counts, tokens)
            )
        return self.known[nodes]

    def form(self, nodes: tuple[str, ...], step: int) -> Formation | None:
        """Train on all available nodes."""
        if len(nodes) < EP_NODES:
            return None
        seconds = self.step_s(len(nodes))
        return Formation(nodes=nodes, samples=len(nodes) * SEQUENCES, step_s=lambda _: seconds)

    def shrink(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation | None:
        """Continue on the remaining nodes."""
        return self.form(alive, step)

    def grow(self, before: Formation, alive: tuple[str, ...], step: int) -> Formation:
        """Use all available nodes."""
        return self.form(alive, step) or before

    def rebalance(self, before: Formation, step: int) -> Formation:
        """Keep the placement, because the loads do not change."""
        return before

    def steps_at_same_pace(self, step: int) -> int:
        """Return a number of steps beyond the end of the job."""
        return FOR_EVER


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The pace of static chunks."""

    seconds: float
    samples: int = SEQUENCES

    def step_s(self, step: int) -> float:
        """Return a step's seconds."""
        return self.seconds

    def steps_at_same_pace(self, step: int) -> int:
        """Return a number of steps beyond the end of the job."""
        return FOR_EVER


def chunks_of(pace: Pace, loads: IntArray) -> Chunks:
    """Return the pace of groups of 64 GPUs."""
    shares = loads / loads.sum(axis=1, keepdims=True)
    return Chunks(seconds=pace.step_s(chunk_load(shares, EP_NODES * GPUS), chunk_load(shares, EP_NODES)))


def preemptions(nodes: int, probability: float, seed: int) -> Window:
    """Return the times at which nodes are preempted and replaced, over the largest number of hours."""
    rng = random.Random(seed)
    names = [f"node{number:03}" for number in range(nodes)]
    there = set(names)
    events: list[NodeEvent] = []
    for hour in range(MOST_HOURS):
        replaced = rng.random()
        for name in names:
            comes = name not in there
            if rng.random() < (replaced if comes else probability):
                events.append(NodeEvent(seconds=HOUR * (hour + rng.random()), add=comes, node=name, line=0))
                there ^= {name}
    events.sort(key=lambda event: event.seconds)
    batches = tuple(Batch(seconds=event.seconds, events=(event,)) for event in events)
    return Window(start_nodes=tuple(names), batches=batches, seconds=HOUR * MOST_HOURS)


def compared_policies(pace: Pace, loads: IntArray) -> dict[str, Policy]:
    """Return the compared policies by name."""
    chunks = chunks_of(pace, loads)
    return {
        "holdfast": Sized(pace=pace, loads=loads),
        "DS(FT)": Static(name="DS(FT)", pace=chunks, ep_size=EP_NODES, live=True),
        "DS": Static(name="DS", pace=chunks, ep_size=EP_NODES, live=False),
    }


def costs(policy: Policy, nodes: int, probability: float, restart_s: float) -> Costs:
    """Return the cost of failures and the checkpoint interval of a policy."""
    formation = policy.form(tuple(map(str, range(nodes))), 0)
    assert formation is not None
    period = HOUR
    if policy.restarts_to_grow:
        rate = nodes * probability / HOUR
        period = float(best_period(rate=rate, save=SAVE_S, detect=0.0, restart=restart_s))
    return Costs(
        reconfigure_s=RECONFIGURE_S,
        rebalance_s=0.0,
        restart_s=restart_s,
        save_s=SAVE_S,
        checkpoint_every=max(1, round(period / formation.step_s(0))),
    )


def hours_taken(policy: Policy, nodes: int, probability: float, options: argparse.Namespace) -> FloatArray:
    """Return the hours that the samples took in each trial, or inf if longer than the simulated time."""
    found: list[float] = []
    paid = costs(policy, nodes, probability, options.restart_s)
    for seed in range(options.trials):
        lived = ModelledJob(policy, paid, preemptions(nodes, probability, seed), SAMPLES).run()
        found.append(lived.course[-1][0] / HOUR if lived.samples >= SAMPLES else math.inf)
    return np.array(found)


def format_estimate(found: Estimate) -> str:
    """Format a mean and half the width of its 95 % interval."""
    return f"{found.mean:6.2f} +- {found.high - found.mean:4.2f}"


def compare_setting(
    players: dict[str, Policy],
    nodes: int,
    probability: float,
    paper: tuple[float, float] | None,
    options: argparse.Namespace,
) -> dict[str, Estimate]:
    """Print one setting's row; return the times relative to holdfast."""
    taken = {name: hours_taken(policy, nodes, probability, options) for name, policy in players.items()}
    over = {name: estimate(values / taken["holdfast"], 0.95) for name, values in taken.items()}
    said = "-" if paper is None else f"{paper[0]} and {paper[1]}"
    print(
        f"  {nodes * GPUS:5} GPUs, {probability:4}   {format_estimate(estimate(taken['holdfast'], 0.95))} h   "
        f"DS(FT) {format_estimate(over['DS(FT)'])}   DS {format_estimate(over['DS'])}   the paper: {said}"
    )
    return over


def make(options: argparse.Namespace) -> None:
    """Print and draw the figure."""
    model = PerfModel.read(require_file(options.data, Path("perfmodel") / "dsv3_perfmodel.json"))
    loads = substitute(options.data) if options.zipf is None else zipf(options.zipf)
    pace = Pace(times=model.layer(TOKENS, tp=GPUS, dp=EP_NODES))
    players = compared_policies(pace, loads)
    elastic, chunks = Sized(pace=pace, loads=loads), chunks_of(pace, loads)
    even = np.ones(LAYERS)
    name = "recorded SmartMoE layers" if options.zipf is None else f"Zipf {options.zipf:g}"
    print(
        f"Figure 13, SIMULATED, routing: {name} (a substitute). A step of {SEQUENCES} sequences a node: in perfect "
        f"balance {pace.step_s(even, even):.2f} s, ours on {NODES} nodes {elastic.step_s(NODES):.2f} s, chunks "
        f"{chunks.seconds:.2f} s\n  GPUs, probability of preemption an hour; our hours; times over ours, mean +- 95 %"
    )
    by_probability = {
        one: compare_setting(players, NODES, one, PAPER_BY_PROBABILITY.get(one), options) for one in PROBABILITIES
    }
    by_nodes = {
        one: by_probability[PROBABILITY]
        if one == NODES
        else compare_setting(players, one, PROBABILITY, PAPER_BY_NODES.get(one), options)
        for one in SIZES
    }
    figure, panels = make_sheet(2, width=6.0)
    draw(panels[0], by_probability, PAPER_BY_PROBABILITY, "probability of preemption in an hour, 512 GPUs", str)
    draw(panels[1], by_nodes, PAPER_BY_NODES, f"GPUs, probability {PROBABILITY}", lambda nodes: str(nodes * GPUS))
    panels[0].set_ylabel("job completion time over ours (simulated)")
    panels[0].legend(fontsize=8)
    save(figure, options.out, "figure_13")


def draw(
    axes: Any,
    found: Mapping[N, dict[str, Estimate]],
    paper: Mapping[N, tuple[float, float]],
    title: str,
    label: Callable[[N], str],
) -> None:
    """Draw one panel, with a bar for each policy and setting."""
    for place, name in enumerate(NAMES):
        at = [group + 0.27 * (place - 1) for group in range(len(found))]
        heights = [one[name].mean for one in found.values()]
        halves = [one[name].high - one[name].mean for one in found.values()]
        axes.bar(at, heights, 0.25, yerr=halves, capsize=3, color=COLOURS[name], label=name)
        if place:
            marks = [(x, paper[key][place - 1]) for x, key in zip(at, found, strict=True) if key in paper]
            axes.plot(*zip(*marks, strict=True), "kx", label="the paper" if place == 1 else None)
    axes.set_xticks(range(len(found)), [label(key) for key in found])
    axes.set_xlabel(title)


def main(words: Sequence[str] | None = None) -> int:
    """Run; return 2 if the data is missing."""
    parser = make_parser(__doc__)
    parser.add_argument("--trials", type=at_least(2), default=10, help="an interval needs 2")
    parser.add_argument("--restart-s", type=from_zero, default=RESTART_S, help="seconds that a restart takes")
    parser.add_argument("--zipf", type=from_zero, help="skew of generated loads instead of the recorded ones")
    return run_figure(make, parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
