"""Check that the gallery's scripts compute the same losses with failures as without, and as plain PyTorch.

    make bench-gallery
    python benchmarks/gallery.py --only gan --only ema

Each resilient script runs on 3 nodes twice: once undisturbed, and once with one node killed and another one joining.
Both run in `--verify-state` mode, which compares the hashes of all workers' state after each step. The losses are
compared with the undisturbed run and with the plain script in one process, which gets samples in holdfast's order.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from holdfast.control.agent.zygote import PRELOAD
from holdfast.errors import HoldfastError
from holdfast.protocol.events import FailureDetected, GenerationStarted, StepCommitted
from tests.harness.local_job import LocalJob

ROOT = Path(__file__).resolve().parent.parent
GALLERY = ROOT / "examples" / "gallery"
NODES = 3
PHASES = ("compute", "reducing", "ready", "voted", "passed", "applying")
#: Relative bounds on losses. With float16, a difference in the last bit of a float32 weight can grow to one of float16.
BOUND, HALF_BOUND = 1e-6, 1e-4
TRANSFORMERS = {
    "llama": "transformers.models.llama.modeling_llama",
    "mixtral": "transformers.models.mixtral.modeling_mixtral",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptResult:
    """Results of one script."""

    name: str
    steps: int
    #: Largest relative difference of a loss from the undisturbed run.
    worst_calm: float
    #: Largest relative difference of a loss from the plain script.
    worst_plain: float
    worlds: str
    #: Violated requirements, or "".
    wrong: str


def main() -> int:
    """Run all scripts and print the table; return 1 if a bound is exceeded."""
    lines = load_changed_lines()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=lines.names(), help="only this script")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, broken = random.Random(options.seed), 0
    print(f"{'script':26s} changed  steps  worlds     against calm  against plain")
    for name in options.only or lines.names():
        change = lines.change_of(name)
        if name in TRANSFORMERS and importlib.util.find_spec("transformers") is None:
            print(f"{name:26s} {change.changed:7d}  left out: transformers is not installed", flush=True)
            continue
        try:
            row = compare(name, options.steps, rng)
        except (HoldfastError, subprocess.CalledProcessError) as error:
            print(f"{name:26s} {change.changed:7d}  {error}", flush=True)
            broken += 1
            continue
        wrong = row.wrong or (f"{change.changed} lines changed" if change.changed > lines.MAX_CHANGED else "")
        broken += bool(wrong)
        print(
            f"{name:26s} {change.changed:7d}  {row.steps:5d}  {row.worlds:9s}  {row.worst_calm:12.1e}  "
            f"{row.worst_plain:13.1e}  {wrong}",
            flush=True,
        )
    return 1 if broken else 0


def load_changed_lines() -> ModuleType:
    """Return the module next to the scripts that counts changed lines."""
    spec = importlib.util.spec_from_file_location("changed_lines", GALLERY / "changed_lines.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(name: str, steps: int, rng: random.Random) -> ScriptResult:
    """Run the plain script, then the resilient script undisturbed and with faults."""
    # Some scripts write the trained model into the current folder.
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder, contextlib.chdir(folder):
        plain = plain_losses(name, steps)
        calm, _ = run_script(name, steps)
        harmed, worlds = run_script(name, steps, rng)
    bound = HALF_BOUND if name == "fp16" else BOUND
    worst_calm, worst_plain = largest_difference(calm, harmed), largest_difference(plain, harmed)
    wrong = [f"loss off by {value:.1e}" for value in (worst_calm, worst_plain) if not value <= bound]
    if NODES - 1 not in worlds or max(worlds[worlds.index(NODES - 1) :]) < NODES:
        wrong.append("no node was killed, or none joined, in time")
    seen = ", ".join(map(str, worlds))
    return ScriptResult(
        name=name,
        steps=len(harmed),
        worst_calm=worst_calm,
        worst_plain=worst_plain,
        worlds=seen,
        wrong="; ".join(wrong),
    )


def largest_difference(wanted: Sequence[float], losses: Sequence[float]) -> float:
    """Return the largest relative difference of a loss."""
    return max(abs(a - b) / abs(a) for a, b in zip(wanted, losses, strict=True))


def plain_losses(name: str, steps: int) -> list[float]:
    """Return the losses that the plain script prints for each step, run in one process."""
    script = [str(GALLERY / f"{name}_plain.py"), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "in_order.py"), *script]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [float(loss) for loss in re.findall(r"^step \d+ (?:\w+ )?loss (\S+)$", done.stdout, re.MULTILINE)]


def run_script(name: str, steps: int, rng: random.Random | None = None) -> tuple[list[float], list[int]]:
    """Return the loss of every step and the sequence of world sizes; inject faults if `rng` is given."""
    preload = ",".join((*PRELOAD, TRANSFORMERS[name]) if name in TRANSFORMERS else PRELOAD)
    options = ["--nodes", str(NODES), "--verify-state", "1", "--allow-faults", "--preload", preload]
    if name == "nanogpt":  # it keeps its best model
        options += ["--checkpoint-dir", "calm" if rng is None else "harmed"]
    job = LocalJob(GALLERY / f"{name}.py", ("--steps", str(steps)), options=options)
    with job:
        if rng is not None:
            inject_faults(job, steps, rng)
        code = job.wait_exit(timeout=300)
        if code != 0:
            raise HoldfastError(f"the job ended with {code}:\n{job.story()}")
        for event in job.all(FailureDetected)[1:]:
            print(
                f"{name}: {event.node} failed but was not killed by this benchmark: {event.kind}, {event.detail}",
                flush=True,
            )
        committed = job.all(StepCommitted)
        worlds = [event.world_size for event in job.all(GenerationStarted)]
        return [float("nan") if event.loss is None else event.loss for event in committed], worlds


def inject_faults(job: LocalJob, steps: int, rng: random.Random) -> None:
    """Kill a node at a random phase of a step in the first third, and add another node."""
    job.wait(StepCommitted, step=1)
    victim, step = rng.choice(job.nodes()), rng.randint(4, max(4, steps // 3))
    with job.client() as client:
        client.inject("kill", victim, step=step, phase=rng.choice(PHASES))
    job.wait(FailureDetected, node=victim)
    with job.client() as client:
        client.add_nodes(1)


if __name__ == "__main__":
    sys.exit(main())
