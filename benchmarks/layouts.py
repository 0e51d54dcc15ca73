"""Measure the cost of replicas that span several workers of a node, and check that nothing is lost (docs/layouts.md).

    make bench-layouts                                  everything
    python benchmarks/layouts.py --only exact

  kill    A node, or one process of a replica group, is killed at a random moment and returns: how long no step is
          committed, less a step; how long an arrival delays the others; how many bytes each arrival receives.
  exact   For each layout: 100 steps or more with six kills, so that each role is hit, and an arrival after each kill.
          The losses are compared with one process (float64), and no step or sample may be lost or counted twice.
  change  A node of three is killed, and another one joins. Three nodes use shard = 2, two nodes shard = 4. Measures how
          long no step is committed during a change of layout, including the start of the workers; losses as above.
  memory  Memory of a worker under shard = 4, less that with a tiny model, relative to the state of the full model.

two_trees.py compares a job without a layout with an older source tree. All figures except memory come from the jobs'
event files. The model is that of examples/fsdp_gpt.py.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import asked
from asked import Figure
from ending import end_in_order
from recovery import SETTLE_STEPS, RecoveryBench
from standstill import SuspensionWatch

from holdfast.observability.event_lines import read_events
from holdfast.observability.history.audit import audit_events
from holdfast.observability.report import committed_steps
from holdfast.protocol.events import FailureDetected, GenerationStarted, LayoutChanged, Recovered, StepCommitted
from holdfast.protocol.layouts.layout import Layout
from tests.harness.local_job import LocalJob

ROOT = Path(__file__).resolve().parent.parent
SCRIPT, WHOLE_SCRIPT = ROOT / "examples" / "fsdp_gpt.py", ROOT / "examples" / "dense_gpt.py"
EXPERTS_SCRIPT = ROOT / "examples" / "moe_gpt.py"
SECTIONS = ("kill", "exact", "change", "memory")
FOREVER = ("--steps", "1000000", "--context", "16")
#: Bytes per parameter for the parameter and both moments of AdamW, in float32.
STATE_BYTES = 3 * 4
#: The same with gradients, as needed for training.
TRAINED_BYTES = 4 * 4
STEPS, KILLS = 100, 6
#: Numbers of nodes and layouts; each world must be small enough for two cores.
EXACT = ((3, Layout(shard=2)), (3, Layout(tensor=2)), (2, Layout(shard=2, tensor=2)))
#: The same with experts, which have two copies each while there are two nodes.
EXACT_EXPERTS = ((3, Layout(shard=2)), (3, Layout(tensor=2)))
#: No load-balancing loss: along shard, it would be computed on each local rank's part of a micro-batch.
EXPERTS = ("--experts", "6", "--hidden", "32", "--aux-loss", "0")
#: The limits of the figures.
DOWN_S, STALL_S, LOSS, MEMORY = 0.3, 0.15, 1e-12, 0.3
#: glibc's allocator keeps much of the memory that FSDP2 frees in each pass, so large tensors get their own mappings.
GIVEN_BACK = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1"}
#: Allowed bytes relative to the elements of the state, for step counts and names.
BESIDE = 1.01


def main() -> int:
    """Run the benchmark and print its table; return 1 if anything was lost."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="run only this section; may be repeated")
    parser.add_argument("--rounds", type=int, default=10, help="kills in the section 'kill'")
    parser.add_argument("--seed", type=int, default=1)
    asked.add_figures_option(parser)
    options = parser.parse_args()
    run = Run(options)
    sections: dict[str, Callable[[], int]] = {name: getattr(run, name) for name in SECTIONS}
    codes = [sections[name]() for name in options.only or SECTIONS]
    asked.write_figures(options.figures, run.figures)
    print(f"load of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    print("\n".join(asked.table_lines(run.figures)))
    return max(codes)


class LayoutBench(RecoveryBench):
    """A job whose replica groups are killed, as whole nodes or single processes, and return."""

    def __init__(self, job: LocalJob, watch: SuspensionWatch, rng: random.Random, nodes: int, layout: Layout) -> None:
        super().__init__(job, watch, rng)
        self._nodes, self._layout = nodes, layout
        #: Nodes whose replica group was killed and has returned.
        self._struck: set[str] = set()

    def kill_process(self, place: int) -> None:
        """Kill one process of a replica group; its node restarts the whole group."""
        time.sleep(self.rng.random() * self.median_step())
        victim, since = self.rng.choice(self.job.nodes()), len(self.job.events)
        at = time.time()
        os.kill(self.job.pids(victim)[1][place], 9)
        self.killed.add(victim)  # this benchmark causes its failures
        self.job.wait(FailureDetected, node=victim, since=since)
        self.measure_recovery("one process", at, since, lost=0)
        self.job.wait(
            GenerationStarted, lambda e: self._is_complete(e) and e.time > at + self.median_step(), since=since
        )
        self.wait_steps(since=len(self.job.events), steps=SETTLE_STEPS)
        self.killed.discard(victim)  # it has returned
        self._struck.add(victim)

    def kill_all_roles(self) -> None:
        """Kill one process of each local rank, then whole nodes."""
        for number in range(KILLS):
            if number < min(self._layout.places, KILLS - 2):
                self.kill_process(number)
            else:
                self.kill_at_random(number)

    def received_bytes(self) -> list[float]:
        """Return the bytes that each arrival received, over all its local ranks."""
        return [float(e.moved_bytes) for e in self.job.all(Recovered) if e.action == "grow" and e.moved_bytes]

    def find_losses(self) -> list[str]:
        """Return the losses and the findings of the journal's audit; only this benchmark kills replica groups."""
        self.killed |= self._struck
        audited = audit_events(self.job.events)
        return [*super().find_losses(), *map(str, audited.findings)]

    def _is_complete(self, generation: GenerationStarted) -> bool:
        return generation.world_size == self._nodes * self._layout.places


class Run:
    """The sections of the benchmark and their figures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.figures: list[Figure] = []
        self._options = options

    # ---- the sections; each returns 1 if something was lost ----

    def kill(self) -> int:
        """Kill nodes and processes of sharded replicas at random moments."""
        sizes = ("--layers", "4", "--dim", "128", "--heads", "4")
        with self._bench(3, Layout(shard=2), sizes) as bench:
            for number in range(self._options.rounds):
                if number % 2:
                    bench.kill_process(number // 2 % 2)
                else:
                    bench.kill_at_random(number)
            code = bench.report()
            down = {kind: tuple(tally.down) for kind, tally in bench.tallies.items()}
            state = _parameters(sizes) * STATE_BYTES
            received = tuple(value / state for value in bench.received_bytes())
            stalls = tuple(bench.stalls)
        self.figures += [
            Figure(name=f"down less a step: {kind}", values=values, asked=DOWN_S, unit="s")
            for kind, values in down.items()
        ]
        self.figures += [
            Figure(name="an arrival's stall", values=stalls, asked=STALL_S, unit="s"),
            Figure(
                name="received by both places of a node, of the state",
                values=received,
                asked=BESIDE,
                each=True,
                unit="x",
                how="each its own shards: 1; each all of it: 2",
            ),
        ]
        return code

    def exact(self) -> int:
        """Compare each layout, with repeated kills, to one process."""
        sizes = ("--layers", "2", "--dim", "32", "--heads", "2", "--dtype", "float64")
        code = self._exact("", SCRIPT, sizes, EXACT)
        with_experts = self._exact("experts, ", EXPERTS_SCRIPT, (*sizes, *EXPERTS), EXACT_EXPERTS)
        return max(code, with_experts)

    def change(self) -> int:
        """Use one layout on three nodes and another one on two, and change between them."""
        sizes, code = ("--layers", "2", "--dim", "32", "--heads", "2", "--dtype", "float64"), 0
        spread = ("--shard", "4", "--shard-from", "3:2", "--micro-batch", "4")
        options = ("--nodes", "3", "--workers-per-node", "4", "--max-restarts", "1000")
        found: list[tuple[str, float]] = []
        with SuspensionWatch() as watch, LocalJob(SCRIPT, (*FOREVER, *sizes, *spread), options=options) as job:
            bench = LayoutBench(job, watch, random.Random(self._options.seed), 3, Layout(shard=2))
            job.wait(StepCommitted, timeout=600.0)  # twelve processes import torch
            bench.wait_steps(since=0, steps=10)
            for _ in range(max(1, self._options.rounds // 5)):
                since = len(job.events)
                victim = bench.rng.choice(job.nodes())
                bench.killed.add(victim)
                job.signal_node(victim)
                down = job.wait(LayoutChanged, since=since, timeout=300.0)
                bench.wait_steps(since=len(job.events), steps=10)
                since = len(job.events)
                job.add_nodes(1)
                up = job.wait(LayoutChanged, since=since, timeout=300.0)
                bench.wait_steps(since=len(job.events), steps=10)
                found += [(f"{e.from_layout} to {e.to_layout}", e.down_s) for e in (down, up)]
            code = bench.report()
            steps = {e.step: e.loss or 0.0 for e in committed_steps(read_events(job.events_file))}
        serial = self._serial((*sizes, "--micro-batch", "4"), max(steps), SCRIPT)
        off = max(abs(loss - serial[step]) / abs(serial[step]) for step, loss in steps.items())
        name = f"layouts that change: loss of {len(steps)} steps, off by"
        print(f"{name} {off:.2e}", flush=True)
        self.figures.append(Figure(name=name, values=(off * 1e12,), asked=LOSS * 1e12, each=True, unit="e-12"))
        for way in dict.fromkeys(way for way, _ in found):
            values = tuple(seconds for other, seconds in found if other == way)
            self.figures.append(Figure(name=f"no step, {way}", values=values, asked=None, unit="s"))
        return code

    def memory(self) -> int:
        """Measure two replicas, with a fourth of the model per worker or all of it, and both with a tiny model."""
        large = ("--layers", "24", "--dim", "384", "--heads", "6", "--global-batch", "8")
        small = ("--layers", "1", "--dim", "8", "--heads", "1", "--global-batch", "8")
        state, taken = _parameters(large) * TRAINED_BYTES, list[float]()
        for places, limit, settings in ((4, MEMORY, GIVEN_BACK), (1, None, GIVEN_BACK), (4, None, {})):
            constant, held = (self._memory_held(places, sizes, settings) for sizes in (small, large))
            taken.append(held - constant)
            how = f"of {state / 2**20:.0f} MiB; the constant, with a tiny model, is {constant / 2**20:.0f} MiB"
            said = "freed memory given back" if settings else "freed memory kept"
            name = f"held under shard = {places}, less a constant, of the state; {said}"
            print(f"{name}: {held / 2**20:.0f} MiB, {how}", flush=True)
            values = (taken[-1] / state,)
            self.figures.append(Figure(name=name, values=values, asked=limit, unit="x", how=how))
        how = "includes each gradient twice: as the local sum, and reduced"
        name = "held under shard = 4, of the memory of a worker with the full model"
        self.figures.append(Figure(name=name, values=(taken[0] / taken[1],), asked=MEMORY, unit="x", how=how))
        return 0

    # ---- inside ----

    def _exact(self, what: str, script: Path, sizes: Sequence[str], cases: Sequence[tuple[int, Layout]]) -> int:
        """Run a script under several layouts, each on its number of nodes."""
        found: dict[str, dict[int, float]] = {}
        code = 0
        for nodes, layout in cases:
            with self._bench(nodes, layout, sizes, script) as bench:
                bench.kill_all_roles()
                while len(bench.job.all(StepCommitted)) < STEPS:
                    bench.wait_steps(since=0, steps=SETTLE_STEPS)
                code = max(code, bench.report())
                file = bench.job.events_file
                name = f"{what}{layout}, {nodes} nodes"
                found[name] = {e.step: e.loss or 0.0 for e in committed_steps(read_events(file))}
        serial = self._serial(sizes, max(max(steps) for steps in found.values()), script)
        for name, steps in found.items():
            off = {step: abs(loss - serial[step]) / abs(serial[step]) for step, loss in steps.items()}
            worst = max(off, key=off.__getitem__)
            name = f"{name}: loss of {len(steps)} steps with {KILLS} kills, off by"
            print(f"{name} {off[worst]:.2e}, at step {worst}", flush=True)
            values = (off[worst] * 1e12,)
            self.figures.append(Figure(name=name, values=values, asked=LOSS * 1e12, each=True, unit="e-12"))
        return code

    @contextmanager
    def _bench(self, nodes: int, layout: Layout, sizes: Sequence[str], script: Path = SCRIPT) -> Generator[LayoutBench]:
        spread = [
            text
            for name, size in (("--shard", layout.shard), ("--tensor", layout.tensor))
            if size > 1
            for text in (name, str(size))
        ]
        options = ["--nodes", str(nodes), "--workers-per-node", str(layout.places), "--max-restarts", "1000"]
        if script is EXPERTS_SCRIPT:
            options += ["--expert-slots", EXPERTS[1]]
        print(f"\n---- {layout}, {nodes} nodes ----", flush=True)
        with SuspensionWatch() as watch, LocalJob(script, (*FOREVER, *sizes, *spread), options=options) as job:
            bench = LayoutBench(job, watch, random.Random(self._options.seed), nodes, layout)
            bench.wait_steps(since=0, steps=10)
            yield bench

    def _serial(self, sizes: Sequence[str], steps: int, script: Path) -> dict[int, float]:
        """Return the losses of one process by step."""
        args = (*FOREVER, *sizes, "--steps", str(steps))
        with LocalJob(script, args, options=("--nodes", "1")) as job:
            if job.wait_exit(timeout=600.0):
                raise SystemExit(f"the serial run failed:\n{job.story()}")
            return {e.step: e.loss or 0.0 for e in job.all(StepCommitted)}

    def _memory_held(self, places: int, sizes: Sequence[str], settings: dict[str, str]) -> float:
        """Return the bytes that a worker holds while training, with this many per node: the median of five readings."""
        options = ("--nodes", "2", "--workers-per-node", str(places))
        args = (*FOREVER, *sizes, "--shard", str(places))
        with LocalJob(SCRIPT, args, options=options, environment=settings) as job:
            job.wait(StepCommitted, step=3)
            worker, looks = job.pids(job.nodes()[0])[1][0], list[float]()
            for step in range(4, 9):
                job.wait(StepCommitted, step=step)
                looks.append(_resident(worker))
            return statistics.median(looks)


def _resident(pid: int) -> float:
    """Return the resident memory of a process without mapped files."""
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(float(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))


def _parameters(sizes: Sequence[str]) -> int:
    """Return the number of parameters of a model of these sizes."""
    sys.path.insert(0, str(SCRIPT.parent))
    from dense_gpt import GPT, argument_parser

    args = argument_parser(None).parse_args([*FOREVER, *sizes])
    return sum(one.numel() for one in GPT(args.layers, args.dim, args.heads, args.context).parameters())


if __name__ == "__main__":
    sys.exit(main())
