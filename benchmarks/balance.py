"""What placements survive and how evenly they give the nodes work, side by side with EPLB.

1. Made loads (Zipf), and recorded ones: every strategy and EPLB on the same slots.
2. 1,024 to 8,192 nodes: how long a plan takes, and one after the loss of two nodes, and how much moves; with the same
   loads, and with others; what is survived against MRO and spread.

A node is the unit of failure. EPLB gets one GPU a node, so that it balances what the others balance; it knows no f.
Times are processor time of one core.

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
    """Return tokens `(L, E)`: the k-th hottest expert gets a share of k ** -exponent, another one in every layer."""
    rng = np.random.default_rng(seed)
    share = 1.0 / np.arange(1, experts + 1) ** exponent
    return np.stack([(rng.permutation(share) * 1e6).astype(np.int64) for _ in range(layers)])


def made_cases() -> list[Case]:
    """The rows that heaviest-first with anti-affinity balances to 1.10, 1.12 and 1.00."""
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
    """The recorded loads, early and late in training."""
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


def placements(case: Case) -> dict[str, Callable[[], np.ndarray]]:
    """Return what makes each placement `(L, E, N)` of a case."""
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
    """Print one case's table; return its rows."""
    print(f"{case.name}, {len(case.loads)} layers, {case.nodes} nodes x {case.slots} slots, f = 2 asked:")
    print("            f given  busiest node / mean (worst layer)  survives 1, 2, ... lost nodes" + " " * 12 + "ms")
    rows: list[dict[str, Any]] = []
    for name, make in placements(case).items():
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


def at_scale(nodes: int, layers: int) -> dict[str, Any]:
    """Print how long plans of `best` take on many nodes, what moves, and whether MRO or spread is better anywhere."""
    experts, slots = 256, as_slots(32, nodes)
    best = strategy_named("best")
    loads = skewed(layers, experts, 1)
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
    for name, tokens in (("replan", loads), ("drifted", loads + skewed(layers, experts, 2) // 10)):
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


def skewed(layers: int, experts: int, seed: int) -> np.ndarray:
    """Return token counts `(L, E)` with a few hot experts and many cold ones."""
    rng = np.random.default_rng(seed)
    return (rng.pareto(1.2, (layers, experts)) * 1000).astype(np.int64) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--routing", type=Path, default=ROUTING, help="folder with the recordings")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--nodes", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--layers", type=int, default=58, help="layers on many nodes")
    options = parser.parse_args()
    results: dict[str, Any] = {"cases": []}
    for case in [*made_cases(), *recorded_cases(options.routing)]:
        results["cases"] += compare(case)
    print("Many nodes, f = 2:")
    results["scale"] = [at_scale(nodes, options.layers) for nodes in options.nodes]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
