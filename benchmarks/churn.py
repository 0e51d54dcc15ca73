"""Shrink a Mixture-of-Experts job to one node and grow it to six again: is anything lost while a copy is left?

    make bench-moe-recovery        runs this after the kills of `recovery.py`

One node at a time is killed at a random moment, after the job has recovered from the previous kill. Then nodes are
added one by one. With 8 slots per node and 8 experts, even the last node can hold all experts.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from recovery import SETTLE_STEPS, RecoveryBench, format_spread
from standstill import SuspensionWatch

from holdfast.protocol.events import GenerationStarted, JobFailed, RolledBack, StepCommitted
from tests.harness.local_job import LocalJob

ROOT = Path(__file__).resolve().parent.parent
MOE = ROOT / "examples" / "moe_gpt.py"
MOE_ARGS = ("--steps", "1000000", "--dim", "64", "--hidden", "128", "--context", "32")


def main() -> int:
    """Run the benchmark and print its table; return 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=6, help="nodes at the start and at the end")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    options = parser.parse_args()
    settings = ("--nodes", str(options.most), "--expert-slots", str(options.slots), "--allow-faults")
    with SuspensionWatch() as watch, LocalJob(MOE, options.args or MOE_ARGS, options=settings) as job:
        bench = RecoveryBench(job, watch, random.Random(options.seed))
        bench.wait_steps(since=0, steps=10)
        shrink_to_one(bench)
        for _ in range(options.most - 1):
            bench.add_node()
        bench.wait_steps(since=len(job.events), steps=SETTLE_STEPS)
        return print_report(bench)


def shrink_to_one(bench: RecoveryBench) -> None:
    """Kill all nodes but one, each after the job has recovered from the previous kill."""
    while len(bench.job.nodes()) > 1:
        nodes = bench.job.nodes()
        time.sleep(bench.rng.random() * bench.median_step())
        since, victim = len(bench.job.events), bench.rng.choice(nodes)
        bench.measure_recovery(f"{len(nodes)} -> {len(nodes) - 1} nodes", bench.kill(victim), since, lost=0)


def print_report(bench: RecoveryBench) -> int:
    """Print the cost of shrinking and growing; return 1 if a step, a sample, an expert or a surviving node was lost."""
    generations = bench.job.all(GenerationStarted)
    steps = bench.job.all(StepCommitted)
    lost_experts = len(bench.job.all(RolledBack)) + len(bench.job.all(JobFailed))
    wrong = bench.find_losses()
    print(f"\nworlds {' '.join(str(generation.world_size) for generation in generations)}, {len(steps)} steps")
    given = [str(generation.fault_threshold.given) for generation in generations if generation.fault_threshold]
    print(f"copies of each expert at least: {' '.join(given)}")
    print(f"experts moved: {' '.join(str(generation.expert_moves) for generation in generations)}")
    print("down less the median step, seconds: " + format_spread([v for t in bench.tallies.values() for v in t.down]))
    print("a joiner's stall, seconds: " + format_spread(bench.stalls))
    print(bench.watch.report())
    print(f"times an expert had no live copy: {lost_experts}")
    print("lost: " + ("nothing (steps 0, samples 0, experts 0)" if not wrong else "; ".join(wrong)))
    return 1 if wrong or lost_experts else 0


if __name__ == "__main__":
    sys.exit(main())
