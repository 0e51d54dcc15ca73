"""Compare samples trained through a spot trace: holdfast, DS(FT) and DS in the same runtime (Lazarus, 6.2 and 6.4).

    make bench-spot                                     the 80-minute trace at 10x and 60x, and single failures at 20x,
                                                        for GPT-L (16 experts, EP size 4) and GPT-S (8, EP size 2)
    python benchmarks/spot.py --model L --speed 60      a part of it
    python benchmarks/spot.py --quick --no-loss         13 minutes of the trace at 60x, in a few minutes

Expert computation is EMULATED: a stated time per token, the same for all, and long compared with the real work of ten
ranks on two cores. On a busy machine, increase --seconds-per-token. Under all policies, workers are forked from a
zygote, and the cost of a restart is measured, not assumed. Routing follows the recorded loads of the model, at 0.9 s of
the paper's time per iteration. DS writes checkpoints every 50 of the paper's steps, the others every 250; holdfast
checks its placement every 200.

DS is `--static-experts --on-node-failure restart-all`, DS(FT) `--static-experts` (docs/baselines.md). The differences
are explained in node-seconds. `down`: time without new steps, beyond a usual step, around a failure, a join or a
roll-back. `idle`: present nodes outside the world. The rest of a difference is the rate of busy nodes: imbalance, and
anything else that makes a step slow. "At most" is the limit set by the emulated work alone: all nodes always busy, in
perfect balance. The loss of every step of holdfast is compared with an undisturbed run (float64).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.observability.event_lines import read_events
from holdfast.observability.report import committed_steps
from holdfast.protocol.events import (
    FailureDetected,
    GenerationStarted,
    NodeLeft,
    NodesJoined,
    ReadEvent,
    Recovered,
    RolledBack,
    StepCommitted,
)
from holdfast.runtime.moe.experts.emulation import BACKWARD_FACTOR

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
PAPER_STEP_S = 0.9
PAPER_REBALANCE_STEPS = 200
#: Speed of the single failures. At 60x, only two steps would lie between two failures.
SINGLE_SPEED = 20.0
#: Approximate seconds of a step with ten nodes on this machine; three quarters of it are emulated.
STEP_S = 2.0
LAYERS = 2
#: Tokens of a sample.
CONTEXT = 32
MODELS = {
    "S": ("lazarus_gpt_S_12L8E.npz", 8),
    "M": ("lazarus_gpt_M_12L12E.npz", 12),
    "L": ("lazarus_gpt_L_12L16E.npz", 16),
}
POLICIES: dict[str, tuple[tuple[str, ...], int]] = {
    "holdfast": ((), 250),
    "DS(FT)": (("--static-experts",), 250),
    "DS": (("--static-experts", "--on-node-failure", "restart-all"), 50),
}
#: Ratios reported by the paper (6.2, 6.4).
GOALS = {
    ("spot", "L"): {"DS": 3.4, "DS(FT)": 1.8},
    ("spot", "S"): {"DS": 2.3, "DS(FT)": 1.2},
    ("single failures", "L"): {"DS": 5.7, "DS(FT)": 2.8},
    ("single failures", "S"): {"DS": 2.8, "DS(FT)": 1.4},
    ("rare failures", "L"): {"DS": 2.3},
    ("rare failures", "S"): {"DS": 1.6},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyResult:
    """The result of one policy: samples that count at the end, and the nodes' time in node-seconds."""

    samples: int
    steps: int
    undone: int
    down: float
    idle: float
    busy: float
    down_s: float
    restarts: int

    def at_most(self, seconds_per_token: float) -> float:
        """Return the samples of a policy without any overhead, on the nodes that were present."""
        a_sample = CONTEXT * LAYERS * seconds_per_token * (1 + BACKWARD_FACTOR)
        return (self.busy + self.idle + self.down) / a_sample


def account(events: Sequence[ReadEvent], until: float) -> PolicyResult:
    """Return the result of a run's events from the first committed step to `until` (Unix seconds)."""
    events = [event for event in events if event.time <= until]
    counted = committed_steps(events)
    ever = [event for event in events if isinstance(event, StepCommitted)]
    begin = ever[0].time
    new: list[StepCommitted] = []
    for step in ever:
        if not new or step.step > new[-1].step:
            new.append(step)
    times = [step.time for step in new] + [until]
    disturbances = [e.time for e in events if isinstance(e, FailureDetected | RolledBack | GenerationStarted)]
    gaps = [(a, b, any(a < at <= b for at in disturbances)) for a, b in itertools.pairwise(times)]
    whole = gaps[:-1]  # the last step was not complete
    calm = [b - a for a, b, disturbed in whole if not disturbed]
    usual = statistics.median(calm or [b - a for a, b, _ in whole] or [0.0])
    lost = [(b, b - a - usual) for a, b, disturbed in gaps if disturbed and b - a > usual]
    total, idle = _node_seconds(events, begin, until)
    down = sum(seconds * _world(events, at) for at, seconds in lost)
    return PolicyResult(
        samples=sum(step.samples for step in counted) - ever[0].samples,
        steps=len(counted),
        undone=len(ever) - len(counted),
        down=down,
        idle=idle,
        busy=max(total - idle - down, 1e-9),
        down_s=sum(seconds for _, seconds in lost),
        restarts=sum(isinstance(e, Recovered) and e.action in ("restart_all", "rollback") for e in events),
    )


def _world(events: Sequence[ReadEvent], at: float) -> int:
    """Return the number of nodes in the world at a time; the others count as idle."""
    return next(e.world_size for e in reversed(events) if e.time <= at and isinstance(e, GenerationStarted))


def _node_seconds(events: Sequence[ReadEvent], begin: float, until: float) -> tuple[float, float]:
    """Return the node-seconds of all present nodes, and of those outside the world."""
    total = idle = 0.0
    present = world = 0
    last = begin
    for event in [*events, None]:
        time = until if event is None else event.time
        span = max(0.0, time - last)
        total, idle = total + span * present, idle + span * max(0, present - world)
        last = max(last, time)
        present += len(event.nodes) if isinstance(event, NodesJoined) else 0
        present -= isinstance(event, NodeLeft)
        world = event.world_size if isinstance(event, GenerationStarted) else world
    return total, idle


def gain_shares(ours: PolicyResult, other: PolicyResult) -> dict[str, float]:
    """Return the shares of the difference in samples that come from restarts, from idle nodes, and from the rest."""
    rate = ours.samples / ours.busy
    parts = {
        "restarts": rate * (other.down - ours.down),
        "idle nodes": rate * (other.idle - ours.idle),
        "imbalance and rest": (rate - other.samples / other.busy) * other.busy,
    }
    gain = sum(parts.values())
    return {name: part / gain for name, part in parts.items()} if gain else dict.fromkeys(parts, 0.0)


def local_steps(paper_steps: int, speed: float) -> int:
    """Return the number of steps here that take as long as some steps of the paper, at a speed."""
    return max(1, round(paper_steps * PAPER_STEP_S / speed / STEP_S))


class TraceBench:
    """Runs policies through traces, one after the other."""

    def __init__(self, options: argparse.Namespace, model: str, folder: Path) -> None:
        self.options = options
        self.model = model
        self.folder = folder
        routing, experts = MODELS[model]
        self.routing = options.data / "routing" / routing
        self.experts = experts

    def script(self, speed: float, steps: int) -> list[str]:
        """Return the script with its arguments."""
        stride = max(1.0, STEP_S * speed / PAPER_STEP_S)
        sizes = (
            f"--layers {LAYERS} --dim 32 --hidden 32 --heads 2 --context {CONTEXT} --global-batch 40 --micro-batch 2 "
            f"--steps {steps}"
        )
        routing = ["--routing-trace", str(self.routing), "--routing-stride", f"{stride:g}"]
        words = [*sizes.split(), "--experts", str(self.experts), "--top-k", "1", "--aux-loss", "0", *routing]
        return [str(ROOT / "examples" / "moe_gpt.py"), *words, "--dtype", "float64", "--dispatch", "minmax"]

    def run_trace(self, trace: Path, speed: float, policy: str, window: Sequence[str] = ()) -> list[ReadEvent]:
        """Run a job of one policy through a trace; return its events up to the trace's end."""
        options, paper_steps = POLICIES[policy]
        every = local_steps(paper_steps, speed)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            events = Path(folder) / "events.jsonl"
            words = [*options, "--rebalance-every", str(local_steps(PAPER_REBALANCE_STEPS, speed))]
            words += ["--checkpoint-dir", f"{folder}/kept", "--checkpoint-every", str(every), *window]
            words += ["--emulate-compute", f"{self.options.seconds_per_token}/token", "--events", str(events), "--json"]
            done = _holdfast(
                "run", "--availability", str(trace), "--speed", str(speed), *words, *self.script(speed, 1_000_000)
            )
            if done.returncode:
                print(f"    {policy}: the job ended with {done.returncode}: {done.stderr.strip()[-300:]}")
            summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["summary"]
            read = read_events(events)
        first = next(event.time for event in read if isinstance(event, StepCommitted))
        return [event for event in read if event.time <= first + summary["elapsed_s"]]

    def compare(self, name: str, trace: Path, speed: float, window: Sequence[str] = ()) -> None:
        """Run all policies through one trace, and print the results."""
        print(f"\n{name}, {speed:g}x, GPT-{self.model} routing ({self.experts} experts), EMULATED compute")
        print("  policy     samples   steps  undone  restarts   down s   idle node-s   busy node-s   ours / it")
        lived: dict[str, PolicyResult] = {}
        for policy in POLICIES:
            events = self.run_trace(trace, speed, policy, window)
            lived[policy] = run = account(events, events[-1].time)
            ratio = lived["holdfast"].samples / max(1, run.samples)
            print(
                f"  {policy:9} {run.samples:8} {run.steps:7} {run.undone:7} {run.restarts:9} {run.down_s:8.1f} "
                f"{run.idle:13.0f} {run.busy:13.0f}   {ratio:.2f}",
                flush=True,
            )
            if policy == "holdfast" and not self.options.no_loss:
                self.check_loss(events, speed)
        most = lived["holdfast"].at_most(self.options.seconds_per_token)
        for other in ("DS(FT)", "DS"):
            goal = GOALS.get((name, self.model), {}).get(other, "none")
            ratio = lived["holdfast"].samples / max(1, lived[other].samples)
            parts = ", ".join(
                f"{part} {share:.0%}" for part, share in gain_shares(lived["holdfast"], lived[other]).items()
            )
            bound = most / max(1, lived[other].samples)
            print(f"  against {other}: {ratio:.2f}x (goal {goal}, at most {bound:.2f}x); of the gain: {parts}")

    def check_loss(self, events: Sequence[ReadEvent], speed: float) -> None:
        """Compare every step's loss with an undisturbed run of one node."""
        steps = committed_steps(events)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            file = Path(folder) / "events.jsonl"
            words = ["--nodes", "1", "--expert-slots", str(self.experts), "--events", str(file), "--plain"]
            _holdfast("run", *words, *self.script(speed, len(steps)))
            calm = committed_steps(read_events(file))
        known = [
            (a.loss, b.loss) for a, b in zip(steps, calm, strict=False) if a.loss is not None and b.loss is not None
        ]
        worst = max(abs(ours - undisturbed) / abs(undisturbed) for ours, undisturbed in known)
        print(
            f"    loss of {len(known)} steps against an undisturbed run: at most {worst:.1e} off (bound 1e-9, float64)"
        )


def _holdfast(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "holdfast", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)


def single_failures(folder: Path, every: int = 300) -> Path:
    """Write a trace in which one of ten nodes fails at regular intervals until half of them are left."""
    lines = [f"0,add,node{number}" for number in range(10)]
    lines += [f"{every * (number + 1)},remove,node{(7 * number + 3) % 10}" for number in range(5)]
    file = folder / "single.csv"
    file.write_text("seconds,event,node\n" + "\n".join(lines) + "\n")
    return file


def main() -> int:
    """Run the selected parts; return 2 if the recorded data is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with spot/ and routing/")
    parser.add_argument("--trace", type=Path, help="availability trace to use instead of the default")
    parser.add_argument("--speed", type=float, action="append", help="speed of the trace (default: 10 and 60)")
    parser.add_argument(
        "--model", choices=sorted(MODELS), action="append", help="model with its experts and loads (default: L and S)"
    )
    parser.add_argument("--seconds-per-token", type=float, default=2e-3)
    parser.add_argument("--until", type=float, default=4800.0, help="stop after this many seconds of the trace")
    parser.add_argument("--no-loss", action="store_true", help="do not compare with an undisturbed run")
    parser.add_argument("--quick", action="store_true", help="only 13 minutes of the trace, at 60x")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--single", action="store_true", help="only single failures")
    parts.add_argument("--spot", action="store_true", help="only the trace")
    options = parser.parse_args()
    trace = options.trace or options.data / "spot" / "lazarus_p3_80min_cap10.csv"
    models = options.model or ["L", "S"]
    for file in (trace, *(options.data / "routing" / MODELS[model][0] for model in models)):
        if not file.is_file():
            print(f"{file} does not exist: give --data DIR, the folder with the recorded traces", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory(prefix="holdfast-spot-") as folder:
        for model in models:
            run_model(TraceBench(options, model, Path(folder)), trace)
    return 0


def run_model(bench: TraceBench, trace: Path) -> None:
    """Run all selected parts with one model."""
    options = bench.options
    if options.quick:
        bench.compare("spot", trace, 60.0, ("--from", "1900", "--until", "2700"))
        return
    for speed in () if options.single else options.speed or (10.0, 60.0):
        bench.compare("spot", trace, speed, ("--until", str(options.until)))
    speed = options.speed[-1] if options.speed else SINGLE_SPEED
    if not options.spot:
        bench.compare("single failures", single_failures(bench.folder), speed, ("--until", "1800"))


if __name__ == "__main__":
    sys.exit(main())
