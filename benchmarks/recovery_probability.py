"""Compare the recovery probability of all placement strategies.

1. Recorded loads (SmartMoE): joint recovery over all layers at two iterations, and along the trace.
2. All small clusters: the best placement compared with MRO, spread and every possible placement.
3. Random clusters of 4 to 7 nodes, compared with branch and bound.

    python benchmarks/recovery_probability.py [--routing DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from brute_force import all_allocations, all_patterns

from holdfast.planning import (
    PlacementProblem,
    Plan,
    as_slots,
    default_weights,
    make_plan,
    recovery_curve,
    strategies,
    strategy_named,
)
from holdfast.planning.survival.branches import Branches
from holdfast.planning.survival.objective import Objective
from holdfast.planning.survival.pattern import Room
from holdfast.planning.survival.search import NodeLosses, as_masks

NODES, SLOTS, THRESHOLD, LOST = 10, 6, 2, 4
ASKED = {"S_12L8E": 0.86, "M_12L12E": 0.73, "L_12L16E": 0.61}
REBALANCES, EVERY, FIRST = 20, 200, 201
ROUTING = Path(__file__).resolve().parents[2] / "shared" / "data" / "routing"


def plan_for(loads: np.ndarray, name: str, held: np.ndarray | None = None) -> Plan:
    slots = as_slots(SLOTS, NODES)
    plan = make_plan(loads, slots, fault_threshold=THRESHOLD, strategy=strategy_named(name), held=held)
    assert isinstance(plan, Plan)
    return plan


def at_iterations(trace: dict[str, np.ndarray], model: str) -> list[dict[str, Any]]:
    """Return the recovery probability with LOST nodes lost, per strategy, at iterations 201 and 4001."""
    rows: list[dict[str, Any]] = []
    for iteration in (201, 4001):
        tokens = trace["tokens"][np.flatnonzero(trace["iterations"] == iteration)[0]]
        row: dict[str, Any] = {"model": model, "iteration": iteration, "asked": ASKED[model]}
        for name in strategies():
            began = time.perf_counter()
            plan = plan_for(tokens, name)
            row[f"{name}_ms"] = 1e3 * (time.perf_counter() - began)
            row[name] = float(recovery_curve(plan.counts).probability[LOST])
        rows.append(row)
    return rows


def along_the_trace(trace: dict[str, np.ndarray], model: str) -> dict[str, Any]:
    """Rebalance every 200 iterations by the summed loads of the last 200, and compare with a new placement."""
    step = int(trace["iterations"][1] - trace["iterations"][0])
    window = EVERY // step
    at = int(np.flatnonzero(trace["iterations"] == FIRST)[0])
    held: np.ndarray | None = None
    moved: list[float] = []
    changed: list[float] = []
    needed: list[float] = []
    gaps: list[float] = []
    for _ in range(REBALANCES + 1):
        loads = trace["tokens"][at - window + 1 : at + 1].sum(axis=0)
        plan = plan_for(loads, "best", held)
        anew = recovery_curve(plan_for(loads, "best").counts).probability
        if plan.migration is not None and held is not None:
            # Slots with a changed expert, and the smallest number of such slots that the new allocation requires.
            changed.append(float(np.maximum(plan.counts - held, 0).sum() / held.sum()))
            needed.append(float(np.maximum(plan.replicas - held.sum(axis=2), 0).sum() / held.sum()))
            moved.append(plan.migration.expert_moves / (NODES * SLOTS * len(loads)))
            gaps.append(float(np.max(anew - recovery_curve(plan.counts).probability)))
        held, at = plan.counts, at + window
    return {
        "model": model,
        "rebalances": len(moved),
        "moved_mean": float(np.mean(moved)),
        "moved_max": float(np.max(moved)),
        "slots_changed_mean": float(np.mean(changed)),
        "slots_changed_at_least": float(np.mean(needed)),
        "recovery_last": float(recovery_curve(held).probability[LOST]) if held is not None else None,
        "worst_gap_any_count": float(np.max(gaps)),
    }


def small_clusters() -> dict[str, Any]:
    """Compare every allocation with N <= 5, c <= 3, E <= 6, r_e >= f with all placements."""
    total = below = optimal = 0
    slowest = 0.0
    cases = [(n, c, e) for n in range(1, 6) for c in range(1, 4) for e in range(1, 7) if e <= n * c]
    for nodes, slots, experts in cases:
        patterns = all_patterns(nodes, slots, experts)
        weights = default_weights(nodes)
        for threshold in range(1, min(nodes, nodes * min(slots, experts) // experts) + 1):
            for replicas in all_allocations(nodes, slots, experts, threshold):
                problem = PlacementProblem(
                    replicas=replicas[None], slots=np.full(nodes, slots), fault_threshold=threshold
                )
                began = time.perf_counter()
                found = recovery_curve(strategy_named("best").place(problem)).probability
                slowest = max(slowest, time.perf_counter() - began)
                rivals = [recovery_curve(strategy_named(name).place(problem)).probability for name in ("mro", "spread")]
                total += 1
                below += bool((found < np.max(rivals, axis=0) - 1e-12)[: threshold + 2].any())
                optimum = (patterns.curves(replicas, threshold) @ weights).max()
                optimal += bool(found @ weights >= optimum - 1e-9)
    return {"cases": total, "below_mro_or_spread": below, "optimal": optimal, "slowest_ms": 1e3 * slowest}


def random_clusters(number: int) -> dict[str, Any]:
    """Compare random cases of 4 to 7 nodes with the best of all placements (branch and bound with a limit)."""
    rng = np.random.default_rng(0)
    total = optimal = proven = 0
    gaps: list[float] = []
    while total < number:
        nodes, slots, threshold = int(rng.integers(4, 8)), int(rng.integers(2, 6)), int(rng.integers(1, 4))
        experts = int(rng.integers(2, 13))
        spare = nodes * slots - experts * threshold
        if spare < 0 or threshold > nodes:
            continue
        replicas = threshold + rng.multinomial(spare, rng.dirichlet(np.full(experts, rng.choice([0.5, 2.0, 10.0]))))
        problem = PlacementProblem(replicas=replicas[None], slots=np.full(nodes, slots), fault_threshold=threshold)
        losses, weights = NodeLosses(nodes), default_weights(nodes)
        hosts = strategy_named("best").place(problem)[0] > 0
        cost = float(losses.share_of(hosts) @ weights)
        room = Room(most=np.minimum(replicas, nodes), threshold=threshold, slots=problem.slots)
        objective = Objective(weights=weights, ceiling=np.ones(nodes + 1))
        _, least, done = Branches(losses, objective, room, 100_000).improve(as_masks(hosts), cost)
        total += 1
        proven += done
        optimal += cost <= least + 1e-9
        gaps.append(cost - least)
    return {"cases": total, "optimal": optimal, "proven": proven, "largest_gap": max(gaps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--routing", type=Path, default=ROUTING, help="folder with lazarus_gpt_*.npz")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--cases", type=int, default=1441, help="random cases of small clusters")
    options = parser.parse_args()
    results: dict[str, Any] = {"recovery": [], "trace": []}
    print(f"Recorded loads, N={NODES}, c={SLOTS}, f={THRESHOLD}, {LOST} nodes lost, joint over 12 layers:")
    for model in ASKED:
        path = options.routing / f"lazarus_gpt_{model}.npz"
        if not path.exists():
            print(f"  {model}: no recording at {path}, skipped")
            continue
        with np.load(path) as archive:
            trace = {name: archive[name] for name in ("tokens", "iterations")}
        for row in at_iterations(trace, model):
            results["recovery"].append(row)
            values = "  ".join(f"{name} {row[name]:.4f} ({row[f'{name}_ms']:.1f} ms)" for name in strategies())
            print(f"  {model:9s} iteration {row['iteration']:4d}  {values}  asked {row['asked']}")
        row = along_the_trace(trace, model)
        results["trace"].append(row)
        print(
            f"  {model:9s} {row['rebalances']} rebalances: {row['moved_mean']:.2%} of the slots moved on average (most "
            f"{row['moved_max']:.2%}), at most {row['worst_gap_any_count']:.4f} below a new one (asked 10 %, 0.01)\n"
            f"            {row['slots_changed_mean']:.2%} of the slots changed their expert (the new loads demand "
            f"{row['slots_changed_at_least']:.2%}; a replica on a node that already has its expert moves nothing)"
        )
    small = results["small"] = small_clusters()
    print(
        f"Small clusters: {small['cases']} allocations, {small['below_mro_or_spread']} below MRO or spread, "
        f"{small['optimal']} optimal ({small['optimal'] / small['cases']:.2%}), slowest {small['slowest_ms']:.1f} ms"
    )
    drawn = results["random"] = random_clusters(options.cases)
    print(
        f"Random clusters of 4 to 7 nodes: {drawn['cases']} cases, in {drawn['cases'] - drawn['optimal']} "
        f"({1 - drawn['optimal'] / drawn['cases']:.2%}) there is a better one, by at most {drawn['largest_gap']:.4f} "
        f"(in {drawn['proven']} cases all placements were searched)"
    )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
