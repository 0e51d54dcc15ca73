"""Check that a job with faults computes the same: losses against an undisturbed run, and replicas bit for bit.

    make bench-precision

With 10 faults and changing world sizes, relative errors are bounded at every step. A dense model and a
Mixture-of-Experts model with fixed routing train 200 steps: float64 <= 1e-9, fp32 at lr 1e-3 <= 1e-5. The MoE model
with its learned gate, and a DeepSeek-V3 of transformers with a balancing bias, train 100 steps: float64 <= 1e-9.

In `--verify-state` mode the coordinator compares a hash of all replicated state after every step, and the ranks compare
all copies of each expert.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from holdfast.protocol.events import Recovered, StepCommitted
from tests.harness.local_job import LocalJob

ROOT = Path(__file__).resolve().parent.parent
FIXED = ROOT / "benchmarks" / "fixed_routing.py"
SIZES = ("--layers", "2", "--dim", "64", "--heads", "2", "--context", "64", "--lr", "1e-3")
MOE_SIZES = ("--layers", "2", "--dim", "32", "--hidden", "64", "--heads", "2", "--context", "32", "--lr", "1e-3")
CONVERTED_SIZES = ("--layers", "3", "--dim", "32", "--context", "32", "--bias-rate", "1e-3", "--lr", "1e-3")
BOUNDS = {"float64": 1e-9, "float32": 1e-5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model with its precisions and number of steps. `workload`: script and arguments."""

    name: str
    workload: tuple[str, ...]
    dtypes: tuple[str, ...]
    steps: int


def main() -> int:
    """Compare disturbed with undisturbed runs; return 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="steps of each run (default: 200 or 100)")
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="run only cases with this text in their names")
    options = parser.parse_args()
    broken = 0
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        for case in cases(Path(folder)):
            if (options.only or "") in case.name:
                broken += sum(compare(case, dtype, options) > BOUNDS[dtype] for dtype in case.dtypes)
    return 1 if broken else 0


def cases(folder: Path) -> list[Case]:
    """Return all cases, after recording the assignments for the fixed routing."""
    routing = str(folder / "routing.npz")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(FIXED), "--record", routing, *MOE_SIZES], check=True, env=environment)
    dense = (str(ROOT / "examples" / "dense_gpt.py"), *SIZES)
    fixed = (str(FIXED), "--routing", routing, *MOE_SIZES)
    learned = (str(ROOT / "examples" / "moe_gpt.py"), *MOE_SIZES)
    converted = (str(ROOT / "benchmarks" / "deepseek_float64.py"), *CONVERTED_SIZES)
    return [
        Case(name="dense", workload=dense, dtypes=("float64", "float32"), steps=200),
        Case(name="experts, fixed routing", workload=fixed, dtypes=("float64", "float32"), steps=200),
        Case(name="experts, learned gate", workload=learned, dtypes=("float64",), steps=100),
        Case(name="converted DeepSeek-V3, bias", workload=converted, dtypes=("float64",), steps=100),
    ]


def compare(case: Case, dtype: str, options: argparse.Namespace) -> float:
    """Run a case without and with faults; print and return the largest relative difference of a loss."""
    script, *args = case.workload
    steps = options.steps or case.steps
    args += ["--steps", str(steps), "--dtype", dtype]
    calm, _ = run(Path(script), args, steps, faults=0, seed=options.seed)
    harmed, worlds = run(Path(script), args, steps, faults=options.faults, seed=options.seed)
    worst = max(abs(a - b) / abs(a) for a, b in zip(calm, harmed, strict=True))
    print(
        f"{case.name}, {dtype}: {options.faults} faults, worlds {worlds}, {len(calm)} steps, replicas bit-equal after "
        f"each: largest relative difference of the loss {worst:.2e} (bound {BOUNDS[dtype]:.0e})",
        flush=True,
    )
    return worst


def run(script: Path, args: list[str], steps: int, *, faults: int, seed: int) -> tuple[list[float], list[int]]:
    """Return the loss of every step and the world sizes that occurred.

    The faults are kills; after every second one, two nodes are added.
    """
    rng = random.Random(seed)
    with LocalJob(script, args, options=("--nodes", "4", "--verify-state", "1", "--allow-faults")) as job:
        since = 0
        for number in range(faults):
            job.wait(StepCommitted, step=(number + 1) * steps // (faults + 2))
            if number:
                # Wait for the previous recovery. Never kill one of two nodes, which cannot hold two copies of each
                # expert, or one of three while the third is still receiving them.
                place = job.events.index(job.wait(Recovered, since=since))
                job.wait(StepCommitted, lambda e: e.world_size > 2, since=place)
            since = len(job.events)
            job.signal_node(rng.choice(job.nodes()))
            if number % 2:
                with job.client() as client:
                    client.add_nodes(2)
        code = job.wait_exit(timeout=600)
        if code != 0:
            raise SystemExit(f"the job ended with {code}:\n{job.story()}")
        committed = job.all(StepCommitted)
        return [math.nan if e.loss is None else e.loss for e in committed], sorted({e.world_size for e in committed})


if __name__ == "__main__":
    sys.exit(main())
