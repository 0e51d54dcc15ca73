"""What placements survive and how evenly they give the nodes work, side by side with EPLB.

1. Made loads (Zipf), and recorded ones: every strategy and EPLB on the same slots.

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--routing", type=Path, default=ROUTING, help="folder with the recordings")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    results: dict[str, Any] = {"cases": []}
    for case in [*made_cases(), *recorded_cases(options.routing)]:
        results["cases"] += compare(case)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
