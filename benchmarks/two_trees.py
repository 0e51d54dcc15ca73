"""Compare the processor time of a job's steps with another source tree of this project, in one process.

    python benchmarks/two_trees.py ../other-tree --pairs 10
    python benchmarks/two_trees.py ../other-tree --small

A step passes through the worker's state machine, the reduction and the vote, in a world of one and without a layout.
The model is that of the recovery benchmark, or with `--small` one with steps of 35 ms, which shows overhead better. The
modules of both trees are loaded, and those of the active tree are put into `sys.modules`. Other load affects both
equally. The tree created first in a process takes about a hundredth more. Each block is therefore combined with one
from another process that created them in the other order (geometric mean of both).
"""

from __future__ import annotations

import argparse
import gc
import math
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import asked
import torch
from asked import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from dense_gpt import GPT, Bytes, loss_of, read_text  # noqa: E402

#: Allowed ratio for a job without a layout (issue 22).
PROCESSOR = 1.005
CONTEXT = 16


@dataclass(frozen=True)
class Model:
    """The sizes of a model, and the number of steps in a block."""

    layers: int
    dim: int
    block_steps: int


RECOVERY, SMALL = Model(6, 256, 5), Model(4, 64, 40)


class Tree:
    """A job of one source tree: its modules and its steps.

    Args:
        source: the folder that contains its `holdfast`.
        model: the sizes of the model.
    """

    def __init__(self, source: Path, model: Model) -> None:
        self._sizes = model
        self._modules: dict[str, ModuleType] = {}
        sys.path.insert(0, str(source))
        try:
            with self._imported():
                self._steps = self._start_job()
                self.run(model.block_steps)
        finally:
            sys.path.remove(str(source))

    def time_block(self) -> float:
        """Return the processor seconds of a step, averaged over a block."""
        with self._imported():
            gc.collect()
            begun = time.process_time()
            self.run(self._sizes.block_steps)
            return (time.process_time() - begun) / self._sizes.block_steps

    def run(self, count: int) -> None:
        """Run this many steps."""
        for _ in range(count):
            step = next(self._steps)
            for batch in step.micro_batches():
                step.backward(loss_of(self._model, batch))
            assert step.apply()

    def _start_job(self) -> Iterator[Any]:
        import holdfast
        from holdfast.runtime.tensors import seed_all

        job = holdfast.init()
        seed_all(0)
        self._model = GPT(self._sizes.layers, self._sizes.dim, 4, CONTEXT)
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        data = Bytes(read_text(None), CONTEXT)
        job.protect(self._model, optimizer, data, global_batch=32, micro_batch=4, seed=0, max_grad_norm=1.0)
        return iter(job.steps(1_000_000))

    @contextmanager
    def _imported(self) -> Generator[None]:
        """Make `import holdfast` use this tree."""
        others = _remove_modules()
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            self._modules = _remove_modules()
            sys.modules.update(others)


def main() -> int:
    """Run the benchmark and print its figure; return 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other tree")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of processes (default: 10)")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of each process (default: 6)")
    parser.add_argument("--small", action="store_true", help="use a model with steps of 35 ms")
    parser.add_argument(
        "--first", choices=("ours", "theirs"), help="run as one process of a pair, and create this tree first"
    )
    asked.add_figures_option(parser)
    options = parser.parse_args()
    if options.first is not None:
        model = SMALL if options.small else RECOVERY
        print(*compare(options.other, model, options.blocks, options.first == "ours"))
        return 0
    ratios: list[float] = []
    for _ in range(options.pairs):
        ways = [_run_process(options, first) for first in ("ours", "theirs")]
        ratios += [math.sqrt(a * b) for a, b in zip(*ways, strict=True)]
        print(*(f"{ratio:.4f}" for ratio in ratios[-options.blocks :]), flush=True)
    low, high = interval(ratios)
    how = f"95 % interval {low:.4f}..{high:.4f}"
    figure = Figure(name="a step against the other tree's", values=tuple(ratios), asked=PROCESSOR, unit="x", how=how)
    asked.write_figures(options.figures, [figure])
    print("\n".join(asked.table_lines([figure])))
    return 0 if low <= PROCESSOR else 1


def compare(other: Path, model: Model, blocks: int, ours_first: bool) -> list[float]:
    """Return the ratio of our steps to theirs in each block."""
    torch.set_num_threads(1)
    sources = [ROOT / "src", other.resolve() / "src"]
    made = {source: Tree(source, model) for source in (sources if ours_first else sources[::-1])}
    ours, theirs = (made[source] for source in sources)
    ratios: list[float] = []
    for number in range(blocks):
        turns = (ours, theirs) if number % 2 else (theirs, ours)
        taken = {tree: tree.time_block() for tree in turns}
        ratios.append(taken[ours] / taken[theirs])
    return ratios


def _run_process(options: argparse.Namespace, first: str) -> list[float]:
    command = [sys.executable, __file__, str(options.other), "--blocks", str(options.blocks), "--first", first]
    command += ["--small"] if options.small else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [float(word) for word in done.stdout.splitlines()[-1].split()]


def interval(values: list[float]) -> tuple[float, float]:
    """Return a 95 % interval of the median, from the order of the values (binomial distribution)."""
    ordered, away = sorted(values), round(0.98 * math.sqrt(len(values)))
    return ordered[max(len(ordered) // 2 - away, 0)], ordered[min(len(ordered) // 2 + away, len(ordered) - 1)]


def _remove_modules() -> dict[str, ModuleType]:
    """Remove all modules of holdfast from `sys.modules` and return them."""
    names = [name for name in sys.modules if name == "holdfast" or name.startswith("holdfast.")]
    return {name: sys.modules.pop(name) for name in names}


if __name__ == "__main__":
    sys.exit(main())
