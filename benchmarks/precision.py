"""Does a job that was harmed compute the same? Loss per step against the undisturbed run, and replicas bit for bit.

    make bench-precision

float64 with 10 faults and changing world sizes: <= 1e-9 relative at every step; fp32 at lr <= 1e-3: <= 1e-5, 200 steps.
In `--verify-state` mode the coordinator compares a hash of all state of all replicas after every step.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from holdfast.control.local_job import LocalJob

ROOT = Path(__file__).resolve().parent.parent
DENSE = ROOT / "examples" / "dense_gpt.py"
SIZES = ("--layers", "2", "--dim", "64", "--heads", "2", "--context", "64", "--lr", "1e-3")
BOUNDS = {"float64": 1e-9, "float32": 1e-5}


def main() -> int:
    """Compare disturbed with undisturbed runs; 1 if a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--script", type=Path, default=DENSE)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    options = parser.parse_args()
    broken = 0
    for dtype, bound in BOUNDS.items():
        args = [*(options.args or SIZES), "--steps", str(options.steps), "--dtype", dtype]
        calm, _ = run(options.script, args, faults=0, seed=options.seed)
        harmed, worlds = run(options.script, args, faults=options.faults, seed=options.seed)
        worst = max(abs(a - b) / abs(a) for a, b in zip(calm, harmed, strict=True))
        broken += worst > bound
        print(
            f"{dtype}: {options.faults} faults, worlds {worlds}, {len(calm)} steps, replicas bit-equal after each: "
            f"largest relative difference of the loss {worst:.2e} (bound {bound:.0e})",
            flush=True,
        )
    return 1 if broken else 0


def run(script: Path, args: list[str], *, faults: int, seed: int) -> tuple[list[float], list[int]]:
    """Return the loss of every step and the world sizes that occurred; faults are kills and arrivals in turn."""
    rng = random.Random(seed)
    with LocalJob(script, args, options=("--nodes", "4", "--verify-state", "--allow-faults")) as job:
        total = int(args[args.index("--steps") + 1])
        for number in range(faults):
            job.wait("step_committed", step=(number + 1) * total // (faults + 2))
            if len(job.nodes()) > 1:
                job.signal_node(rng.choice(job.nodes()))
            if number % 2:
                job.call("add-node", "--count", "2")
        code = job.wait_exit(timeout=600)
        if code != 0:
            raise SystemExit(f"the job ended with {code}:\n{job.story()}")
        steps = job.all("step_committed")
        return [e["loss"] for e in steps], sorted({e["world"] for e in steps})


if __name__ == "__main__":
    sys.exit(main())
