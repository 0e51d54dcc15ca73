"""Compare placements with EPLB: which node losses they survive, and how evenly they balance work over nodes.

1. Generated loads (Zipf) and recorded ones: every strategy and EPLB on the same slots.
2. 1,024 to 8,192 nodes: how long planning takes at first and after the loss of two nodes, and how much moves, with the
   same loads and with changed ones; survival compared with MRO and spread.
3. `holdfast.placement.rebalance_experts` compared with EPLB: 256 experts on 32 GPUs, 20 layers; 200 random cases.

A node is the unit of failure. EPLB gets one GPU per node, so that it balances over the same units as the others. It has
no fault threshold f. Times are processor time of one core.

    OMP_NUM_THREADS=1 python benchmarks/balance.py [--routing DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.placement import rebalance_experts
from holdfast.planning import Plan, as_slots, fewest_hosts, make_plan, recovery_curve, strategies, strategy_named
from holdfast.planning.arrays import indices
from holdfast.planning.balance.eplb import EplbShape, eplb
from holdfast.planning.balance.work import busiest_over_mean
from holdfast.planning.survival.recovery_probability import fatal_share

ROUTING = Path(__file__).resolve().parents[2] / "shared" / "data" / "routing"
MOST_LOST = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Loads `(L, E)` for `nodes` with `slots` each."""

    name: str
    loads: np.ndarray
    nodes: int
    slots: int


def zipf(layers: int, experts: int, exponent: float, seed: int = 0) -> np.ndarray:
    """Return tokens `(L, E)`: the k-th hottest expert of a layer gets a share of k ** -exponent, in random order."""
    rng = np.random.default_rng(seed)
    share = 1.0 / np.arange(1, experts + 1) ** exponent
    return np.stack([(rng.permutation(share) * 1e6).astype(np.int64) for _ in range(layers)])


def zipf_cases() -> list[Case]:
    """Return the cases that heaviest-first placement with anti-affinity balances to 1.10, 1.12 and 1.00."""
    rows = ((32, 8, 8, 0.8), (256, 32, 16, 0.5), (256, 32, 9, 0.5))
    return [
        Case(
            name=f"{experts} experts on {nodes} x {slots}, Zipf {exponent}",
            loads=zipf(4, experts, exponent),
            nodes=nodes,
            slots=slots,
        )
        for experts, nodes, slots, exponent in rows
    ]


def recorded_cases(folder: Path) -> list[Case]:
    """Return cases with recorded loads, from early and late in training."""
    sizes = (
        ("lazarus_gpt_S_12L8E", 10, 6),
        ("lazarus_gpt_M_12L12E", 10, 6),
        ("lazarus_gpt_L_12L16E", 10, 6),
        ("smartmoe_24L32E", 16, 6),
    )
    found: list[Case] = []
    for name, nodes, slots in sizes:
        path = folder / f"{name}.npz"
        if not path.exists():
            print(f"  {name}: no recording at {path}, skipped")
            continue
        with np.load(path) as archive:
            for iteration in (201, 4001):
                loads = archive["tokens"][int(np.flatnonzero(archive["iterations"] == iteration)[0])]
                found.append(Case(name=f"{name}, iteration {iteration}", loads=loads, nodes=nodes, slots=slots))
    return found


def counts_of(expert: np.ndarray, experts: int, nodes: int) -> np.ndarray:
    """Return replicas `(L, E, N)` from the expert in each slot `(L, R)`, slots node by node."""
    layers, slots = expert.shape
    node = indices(slots) // (slots // nodes)
    counts = np.zeros((layers, experts, nodes), dtype=np.int64)
    np.add.at(counts, (indices(layers)[:, None], expert, node[None, :]), 1)
    return counts


def placement_makers(case: Case) -> dict[str, Callable[[], np.ndarray]]:
    """Return a function for each strategy that computes its placement `(L, E, N)` of a case."""
    experts = case.loads.shape[1]
    slots = as_slots(case.slots, case.nodes)

    def planned(name: str) -> np.ndarray:
        plan = make_plan(case.loads, slots, fault_threshold=2, strategy=strategy_named(name))
        assert isinstance(plan, Plan)
        return plan.counts

    shape = EplbShape(replicas=case.nodes * case.slots, groups=1, nodes=1, gpus=case.nodes)
    makers: dict[str, Callable[[], np.ndarray]] = {
        "eplb": lambda: counts_of(eplb(case.loads.astype(np.float64), shape), experts, case.nodes)
    }
    for name in strategies():
        makers[name] = lambda name=name: planned(name)
    return makers


def compare(case: Case) -> list[dict[str, Any]]:
    """Print the table of one case, and return its rows."""
    print(f"{case.name}, {len(case.loads)} layers, {case.nodes} nodes x {case.slots} slots, f = 2 asked:")
    print("            f given  busiest node / mean (worst layer)  survives 1, 2, ... lost nodes" + " " * 12 + "ms")
    rows: list[dict[str, Any]] = []
    for name, make in placement_makers(case).items():
        make()
        began = time.process_time()
        counts = make()
        took = 1e3 * (time.process_time() - began)
        over_mean = busiest_over_mean(counts, case.loads.astype(np.float64))
        survives = recovery_curve(counts).probability[1 : MOST_LOST + 1]
        row = {
            "case": case.name,
            "name": name,
            "given": fewest_hosts(counts),
            "busiest": float(over_mean.mean()),
            "busiest_worst": float(over_mean.max()),
            "survives": survives.tolist(),
            "ms": took,
        }
        rows.append(row)
        shown = " ".join(f"{value:6.3f}" for value in survives)
        print(
            f"  {name:9s} {row['given']:7d}  {row['busiest']:21.3f} ({row['busiest_worst']:.3f})"
            f"      {shown}  {took:9.1f}"
        )
    return rows


def measure_at_scale(nodes: int, layers: int) -> dict[str, Any]:
    """Print planning time of `best` on many nodes, the slots moved, and where MRO or spread survives better."""
    experts, slots = 256, as_slots(32, nodes)
    best = strategy_named("best")
    loads = skewed_loads(layers, experts, 1)
    row: dict[str, Any] = {"nodes": nodes}

    def timed(name: str, tokens: np.ndarray, held: np.ndarray | None) -> Plan:
        began = time.process_time()
        plan = make_plan(tokens, slots, fault_threshold=2, strategy=best, held=held)
        row[f"{name}_s"] = time.process_time() - began
        assert isinstance(plan, Plan)
        return plan

    before = timed("plan", loads, None)
    row["busiest"] = float(busiest_over_mean(before.counts, loads.astype(np.float64)).mean())
    fatal = fatal_share(before.counts > 0).most
    row["worse_at"] = 0
    for name in ("mro", "spread"):
        rival = make_plan(loads, slots, fault_threshold=2, strategy=strategy_named(name))
        assert isinstance(rival, Plan)
        row["worse_at"] += int((fatal > fatal_share(rival.counts > 0).least * (1 + 1e-9)).sum())
    held = before.counts
    held[:, :, [0, nodes // 2]] = 0
    for name, tokens in (("replan", loads), ("drifted", loads + skewed_loads(layers, experts, 2) // 10)):
        plan = timed(name, tokens, held)
        assert plan.migration is not None
        row[f"{name}_moves"] = plan.migration.expert_moves / held.size * experts / 32
        row[f"{name}_needed"] = float(np.maximum(plan.replicas - held.sum(axis=2), 0).sum() / held.size * experts / 32)
        del plan
    print(
        f"  {nodes:5d} nodes x 32 slots, {layers} layers of {experts}: plan {row['plan_s']:5.2f} s, busiest node "
        f"{row['busiest']:.3f}, worse than MRO or spread at {row['worse_at']} of {nodes} numbers of lost nodes\n"
        f"        2 nodes lost and replaced: {row['replan_s']:5.2f} s, {row['replan_moves']:.2%} of the slots; with "
        f"other loads {row['drifted_s']:5.2f} s, {row['drifted_moves']:.2%} (these demand {row['drifted_needed']:.2%})"
    )
    return row


def compare_with_eplb(runs: int) -> dict[str, Any]:
    """Print how long rebalancing on EPLB's inputs takes, and how balanced the results are."""
    results: dict[str, Any] = {"question": [], "random": {}}
    loads = np.random.default_rng(0).pareto(1.2, (20, 256)) * 1000 + 1
    print("20 layers of 256 experts on 32 GPUs of 4 nodes, 288 slots (576 for f = 2): the busiest GPU over the mean")
    asked: list[tuple[str, int, int, int]] = [("hierarchical", 288, 8, 1), ("global", 288, 1, 1), ("f = 2", 576, 8, 2)]
    for name, slots, groups, threshold in asked:
        shape = EplbShape(replicas=slots, groups=groups, nodes=4 if groups > 1 else 1, gpus=32)
        times: list[float] = []
        found = eplb(loads, shape)
        theirs = busiest_gpu(found, loads, 32)
        for _ in range(runs):
            began = time.process_time()
            found = rebalance_experts(loads, slots, groups, 4, 32, fault_threshold=threshold)[0]
            times.append(time.process_time() - began)
        row = {"name": name, "eplb": theirs, "ours": busiest_gpu(found, loads, 32), "s": float(np.median(times))}
        results["question"].append(row)
        print(
            f"  {name:13s} EPLB {theirs:.4f}, ours {row['ours']:.4f}; ours takes {row['s']:.3f} s "
            f"({min(times):.3f} .. {max(times):.3f}, {runs} runs)"
        )
    rng = np.random.default_rng(1)
    ratios: list[float] = []
    for _ in range(200):
        nodes, per_node, groups = int(rng.integers(1, 9)), int(rng.integers(1, 9)), int(rng.choice([1, 2, 4, 8]))
        gpus, experts = nodes * per_node, groups * int(rng.integers(2, 17))
        slots = -(-experts // gpus) * gpus + int(rng.integers(0, 3)) * gpus
        tokens = rng.pareto(1.2, (3, experts)) * 1000 + 1
        theirs = busiest_gpu(
            eplb(tokens, EplbShape(replicas=slots, groups=groups, nodes=nodes, gpus=gpus)), tokens, gpus
        )
        ratios.append(busiest_gpu(rebalance_experts(tokens, slots, groups, nodes, gpus)[0], tokens, gpus) / theirs)
    results["random"] = {"cases": 200, "worst": max(ratios), "mean": float(np.mean(ratios)), "best": min(ratios)}
    print(
        f"  200 random cases: ours over EPLB's {np.mean(ratios):.4f} on average, {min(ratios):.4f} at best, "
        f"{max(ratios):.4f} at worst"
    )
    return results


def busiest_gpu(slots: np.ndarray, loads: np.ndarray, gpus: int) -> float:
    """Return the busiest GPU's load over the mean, the mean over the layers, of the expert in each slot `(L, R)`."""
    return float(busiest_over_mean(counts_of(slots, loads.shape[1], gpus), loads).mean())


def skewed_loads(layers: int, experts: int, seed: int) -> np.ndarray:
    """Return token counts `(L, E)` with a few hot experts and many cold ones."""
    rng = np.random.default_rng(seed)
    return (rng.pareto(1.2, (layers, experts)) * 1000).astype(np.int64) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--routing", type=Path, default=ROUTING, help="folder with the recordings")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--nodes", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--runs", type=int, default=11, help="timed runs on EPLB's inputs")
    parser.add_argument("--layers", type=int, default=58, help="layers on many nodes")
    options = parser.parse_args()
    results: dict[str, Any] = {"cases": []}
    for case in [*zipf_cases(), *recorded_cases(options.routing)]:
        results["cases"] += compare(case)
    results["eplb"] = compare_with_eplb(options.runs)
    print("Many nodes, f = 2:")
    results["scale"] = [measure_at_scale(nodes, options.layers) for nodes in options.nodes]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
