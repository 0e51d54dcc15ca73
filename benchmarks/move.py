"""Measure the cost of moving a node's role to another machine, planned and after a kill, and check the results.

    make bench-move                              all sections, and the other benchmarks of moves (benchmarks/asked.py)
    python benchmarks/move.py --rounds 5 --only one --only plain

  one        Each round, on a job of four nodes with one warm standby:
               move        `holdfast move`: the standby replaces the node, which becomes the standby
               replaced    SIGKILL: the standby replaces the node
               shrunk      SIGKILL without a standby: the others continue; then a node joins
               leave       `holdfast drain` without a standby: the others continue; then a node joins
             and the first step with micro-batches of a joining node: a warm one, and one that has just started
  plain      The same in plain torch with the same model: benchmarks/plain_job.py; a third of the rounds
  several    One, two and three of eight nodes move at once
  every      A move every 20 steps: the time of 400 steps, relative to 400 median steps without a move
  same       The parameters after 400 steps with a move every 20, compared with a run without moves, in float64
  emulated   Samples per second in the 20 s after a kill, relative to before, with emulated accelerators
             (`--emulate-compute`): replaced; shrunk; shrunk while a cold node joins at once; waiting for a cold node

Cost = the longest step from the request until three steps after the node has moved, or the time from the kill to the
first step after it, less the median step. Each used standby is replaced by a new one. All figures come from the job's
event file, except a joining node's own time, which the script records (benchmarks/measured_gpt.py).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import asked
import numpy as np
import plain_job
from asked import Figure
from ending import end_in_order
from measured_gpt import PARAMETERS
from moving import TOGETHER, MoveBench, remaining_rate
from recovery import DENSE_ARGS
from standstill import SuspensionWatch

from holdfast.protocol.events import NodeMoved, StepCommitted
from tests.harness.local_job import LocalJob

SCRIPT = Path(__file__).with_name("measured_gpt.py")
#: Assumed transfer rate of state when two cores carry every stream, and the allowed cost of a move in addition to it.
BYTES_PER_S, SEVERAL_S = 0.8e9, 0.03
EVERY, STEPS = 20, 400
#: The required cost of plain torch relative to a move.
TIMES_LESS = {plain_job.SAVE: 15.0, plain_job.ZYGOTES: 3.0, plain_job.NAIVE: 5.0, plain_job.FORKED: None}
#: Cost of a move that is used for ratios if its measured cost is lower.
LEAST_S = 1e-3
EMULATED, WINDOW_S = "0.25/micro-batch", 20.0


def main() -> int:
    """Run the benchmark and print its tables; return 1 if anything was lost."""
    end_in_order()
    options = _options()
    run = Run(options)
    sections: dict[str, Callable[[], int]] = {name: getattr(run, name) for name in SECTIONS}
    codes = [sections[name]() for name in options.only or SECTIONS]
    asked.write_figures(options.figures, run.figures)
    print("\n" + "\n".join(asked.table_lines(run.figures)))
    return max(codes)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--emulated-rounds", type=int, default=3, help="rounds of the section 'emulated', 3 minutes each"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the sections 'every' and 'same'")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="run only this section; may be repeated")
    parser.add_argument("--script", type=Path, help="another training script; it does not record a joiner's own time")
    asked.add_figures_option(parser)
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    return parser.parse_args()


class Run:
    """The sections of the benchmark and their figures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.figures: list[Figure] = []
        self._options = options
        #: Costs of the moves in section `one`.
        self._moves: tuple[float, ...] = ()

    # ---- the sections; each returns 1 if something was lost ----

    def one(self) -> int:
        """Move, kill and drain one node."""
        with self._bench(4) as bench:
            bench.start_standby()
            for _ in range(self._options.rounds):
                bench.move()
                bench.replace()
                bench.shrink()
                bench.drain()
                bench.start_standby()
            self._moves = bench.costs("move")
            self.figures += one_figures(bench)
            return bench.report()

    def plain(self) -> int:
        """Replace machines in plain torch."""
        rounds = -(-self._options.rounds // 3)
        costs = plain_job.measure(rounds, random.Random(self._options.seed))
        self.figures += plain_figures(costs, self._moves)
        return 0

    def several(self) -> int:
        """Move several of eight nodes at once."""
        counts = (1, 2, 3)
        with self._bench(8) as bench:
            for _ in counts:
                bench.start_standby()
            for _ in range(self._options.rounds):
                for count in counts:
                    bench.move(count, f"{count} of 8 at once")
            for count in counts:
                self.figures += several_figures(bench, f"{count} of 8 at once")
            return bench.report()

    def every(self) -> int:
        """Measure the time of a run with regular moves."""
        with self._bench(4) as bench:
            bench.start_standby()
            efficiency = bench.keep_moving(EVERY, self._options.steps)
            name = f"a move every {EVERY} of {self._options.steps} steps: efficiency"
            print(f"{name} {efficiency:.3f}", flush=True)
            self.figures.append(Figure(name=name, values=(efficiency,), asked=0.97, at_least=True))
            return bench.report()

    def same(self) -> int:
        """Compare the parameters of a run with regular moves to an undisturbed run."""
        wrong = 0
        for clipping in (False, True):
            calm, _, code = self._parameters(clipping, moving=False)
            moved, moves, moved_code = self._parameters(clipping, moving=True)
            self.figures += same_figures(calm, moved, moves, clipping=clipping)
            wrong = max(wrong, code, moved_code)
        return wrong

    def emulated(self) -> int:
        """Kill nodes of jobs with emulated accelerators."""
        kept: dict[str, list[float]] = {"replaced": [], "shrunk": [], "shrunk, a cold node at once": []}
        with self._bench(4, emulated=EMULATED) as bench:
            for _ in range(self._options.emulated_rounds):
                bench.start_standby()
                kept["replaced"].append(_rate_after_kill(bench))
                kept["shrunk"].append(_rate_after_kill(bench))
                bench.add_node()
                kept["shrunk, a cold node at once"].append(_rate_after_kill(bench, joins=True))
            code = bench.report()
        waits: list[float] = []
        with self._bench(4, "--on-node-failure", "wait", emulated=EMULATED) as bench:
            for _ in range(self._options.emulated_rounds):
                waits.append(_rate_after_kill(bench, joins=True))
            kept["waiting for a cold node"] = waits
            code = max(code, bench.report())
        self.figures += emulated_figures(kept)
        return code

    # ---- inside ----

    @contextmanager
    def _bench(self, nodes: int, *options: str, emulated: str = "") -> Generator[MoveBench]:
        """Yield a job with this many nodes that has trained for some steps; its standbys use the same emulation."""
        alike = ("--emulate-compute", emulated) if emulated else ()
        launch = ("--nodes", str(nodes), "--allow-faults", *alike, *options)
        with SuspensionWatch() as watch, tempfile.TemporaryDirectory(prefix="holdfast-") as name:
            script, args, folder = self._workload(Path(name))
            with LocalJob(script, args, options=launch) as job:
                rng = random.Random(self._options.seed)
                bench = MoveBench(job, watch, rng, [*alike, str(script), *args], folder)
                try:
                    bench.wait_steps(since=0, steps=20)
                    yield bench
                finally:
                    bench.end_agents()

    def _workload(self, folder: Path) -> tuple[Path, Sequence[str], Path | None]:
        """Return the script, its arguments, and the folder of its recorded computation times."""
        args = self._options.args or DENSE_ARGS
        if self._options.script is not None:
            return self._options.script, args, None
        return SCRIPT, ("--folder", str(folder), *args), folder

    def _parameters(self, clipping: bool, *, moving: bool) -> tuple[np.ndarray, int, int]:
        """Train in double precision; return all parameters, the number of moves, and 1 if something was lost."""
        steps = self._options.steps
        with SuspensionWatch() as watch, tempfile.TemporaryDirectory(prefix="holdfast-") as name:
            args = ["--folder", name, *DENSE_ARGS, "--steps", str(steps), "--dtype", "float64"]
            args += [] if clipping else ["--no-clipping"]
            with LocalJob(SCRIPT, args, options=("--nodes", "4")) as job:
                bench = MoveBench(job, watch, random.Random(self._options.seed), [str(SCRIPT), *args])
                try:
                    bench.wait_steps(since=0, steps=2)
                    if moving:
                        bench.start_standby()
                    while moving and job.all(StepCommitted)[-1].step < steps - 2 * EVERY:
                        first = len(job.all(StepCommitted))
                        bench.move_once()
                        bench.wait_steps(since=0, steps=first + EVERY - len(job.all(StepCommitted)))
                    job.wait_exit(timeout=STEPS * 2.0)
                    wrong = bench.find_losses()
                finally:
                    bench.end_agents()
                print(f"{'moved' if moving else 'undisturbed'}, {steps} steps; lost: {'; '.join(wrong) or 'nothing'}")
                moves = len(job.all(NodeMoved))
            return np.load(Path(name) / PARAMETERS), moves, bool(wrong)


def _rate_after_kill(bench: MoveBench, *, joins: bool = False) -> float:
    """Kill a node; return the remaining share of samples per second. joins: start another, cold node."""
    bench.wait_steps(since=len(bench.job.events), steps=12)
    victim, since = bench.rng.choice(bench.job.nodes()), len(bench.job.events)
    at = bench.kill(victim)
    if joins:
        bench.job.add_nodes(1)
    bench.job.wait(StepCommitted, lambda event: event.time >= at + WINDOW_S, since=since)
    kept = remaining_rate(bench.job.all(StepCommitted), at, WINDOW_S)
    print(f"  {kept:.3f} of the samples per second are left", flush=True)
    return kept


# ---- figures and limits ----


def one_figures(bench: MoveBench) -> list[Figure]:
    """Return the figures of moves, and of kills with a standby."""
    joins, shrunk = tuple(bench.stalls), bench.costs("shrunk")
    figures = [
        Figure(name="a planned move, less the step", values=bench.costs("move"), unit="s").with_limit_above(
            joins, 0.01, "joins"
        ),
        total_cost_figure(bench, "move"),
        Figure(name="  a join, less the step", values=joins, unit="s"),
        Figure(name="a kill with a standby, less the step", values=bench.costs("replaced"), unit="s").with_limit_above(
            shrunk, 0.05, "shrinking"
        ),
        Figure(name="  a kill without one: shrinking", values=shrunk, unit="s"),
    ]
    for kind, limit in (("warmed", 1.3), ("cold", None)):
        steps = bench.first_steps.get(kind, [])
        name = f"a {kind} joiner's first step with a share / the median"
        own, processor = tuple(one.own for one in steps), tuple(one.processor for one in steps)
        figures.append(Figure(name=f"{'' if limit else '  '}{name}", values=own, asked=limit, unit="x"))
        figures.append(Figure(name=f"  {name}, processor time", values=processor, unit="x"))
    return figures


def plain_figures(costs: dict[str, list[float]], moves: Sequence[float]) -> list[Figure]:
    """Return the cost of plain torch relative to a planned move."""
    if not moves:
        return [Figure(name=f"{way} (plain torch)", values=tuple(costs[way]), unit="s") for way in costs]
    move = max(statistics.median(moves), LEAST_S)
    return [
        Figure(
            name=f"{way} (plain torch) / a planned move",
            values=tuple(cost / move for cost in costs[way]),
            asked=TIMES_LESS[way],
            at_least=True,
            unit="x",
            how=f"{statistics.median(costs[way]):.3f} s / {move:.3f} s",
        )
        for way in costs
    ]


def several_figures(bench: MoveBench, kind: str) -> list[Figure]:
    """Return the costs of moving several nodes at once, with their limits."""
    moved = statistics.median(bench.moved_bytes[kind])
    how = f"{SEVERAL_S} s + {moved / 1e6:.0f} MB / {BYTES_PER_S / 1e9} GB/s"
    asked_s = SEVERAL_S + moved / BYTES_PER_S
    return [
        Figure(name=f"{kind}, less the step", values=bench.costs(kind), asked=asked_s, unit="s", how=how),
        total_cost_figure(bench, kind),
    ]


def total_cost_figure(bench: MoveBench, kind: str) -> Figure:
    """Return the cost over all steps of an event: on a noisy machine, the longest step is long even without a move."""
    return Figure(name=f"  {kind}{TOGETHER}", values=bench.costs(f"{kind}{TOGETHER}"), unit="s")


def same_figures(calm: np.ndarray, moved: np.ndarray, moves: int, *, clipping: bool) -> list[Figure]:
    """Return the parameter difference from an undisturbed run; without clipping, the number of differing parameters."""
    if clipping:
        name = f"{moves} moves, with clipping: largest difference of a parameter"
        return [Figure(name=name, values=(float(np.abs(calm - moved).max()),), asked=1e-12)]
    name = f"{moves} moves, no clipping: parameters (of {calm.size}) with another bit"
    return [Figure(name=name, values=(float((calm.view(np.uint64) != moved.view(np.uint64)).sum()),), asked=0.0)]


def emulated_figures(kept: dict[str, list[float]]) -> list[Figure]:
    """Return the remaining share of samples per second after kills; only replaced nodes have a limit."""
    return [
        Figure(
            name=f"{'' if kind == 'replaced' else '  '}emulated, {kind}: samples/s of the next {WINDOW_S:g} s / before",
            values=tuple(values),
            asked=0.97 if kind == "replaced" else None,
            at_least=True,
        )
        for kind, values in kept.items()
    ]


SECTIONS = ("one", "plain", "several", "every", "same", "emulated")


if __name__ == "__main__":
    sys.exit(main())
