"""A small training job whose state is reproducible bit by bit, whichever worker computes which micro-batch.

The chaos benchmark injects faults into it. The gradients of each micro-batch are multiples of 2**-24, so that their
float64 sums are exact in any order. Gradients are not clipped. The job uses most kinds of state that a job may have:
two alternating optimizers, a loss scale that sometimes skips a step, running statistics, dropout, an average of the
weights, schedules, evaluations with the best states, logged values, streams and data loader workers.

Each worker appends a hash of all its state to one file after each step. Run alone and without `--step-seconds`, the
script produces the expected hashes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import holdfast

SCALE = 2.0**24
GLOBAL_BATCH, MICRO_BATCH = 32, 4
SAMPLES, HELD_OUT, WIDTH = 512, 32, 16
EVALUATE_EVERY = 40


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the nearest multiples of 2**-24."""
    return (tensor * SCALE).round() / SCALE


def round_to_half(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient rounded to float16, so that it overflows as in float16."""
    return gradient.half().to(gradient.dtype)


class StreamPass:
    """One pass through a stream, four rows at a time; each pass yields different values."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._x, self._y = x, y
        self._at = {"row": 0, "pass": 0}

    def set_epoch(self, number: int) -> None:
        """Start another pass."""
        self._at["pass"] = number

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return dict(self._at)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position."""
        self._at = dict(state)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self._at["row"] + MICRO_BATCH <= len(self._x):
            rows = slice(self._at["row"], self._at["row"] + MICRO_BATCH)
            self._at["row"] += MICRO_BATCH
            yield self._x[rows] + self._at["pass"] / 128, self._y[rows]


class Streams:
    """The same data, read as streams."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._x, self._y = x, y

    def open(self, micro_batch: int, micro_batches: int) -> StreamPass:
        """Return one pass through a micro-batch's stream."""
        return StreamPass(self._x[micro_batch::micro_batches], self._y[micro_batch::micro_batches])


class Training:
    """The model with its optimizers, schedules, scaler, average and data."""

    def __init__(self, hidden: int, *, streams: bool) -> None:
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
        trunk = nn.Sequential(nn.Linear(WIDTH, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.1), nn.Tanh())
        self.trunk, self.head = trunk, nn.Linear(hidden, 1)
        self.model = nn.Sequential(trunk, self.head).double()
        for parameter in self.model.parameters():
            parameter.register_hook(rounded)  # pyright: ignore[reportUnknownMemberType] - likewise
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "trunk": torch.optim.AdamW(trunk.parameters(), lr=1e-3),
            "head": torch.optim.SGD(self.head.parameters(), lr=1e-3, momentum=0.9),
        }
        self.schedules = {f"of {name}": CosineAnnealingLR(one, 500) for name, one in self.optimizers.items()}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=4)
        self.average = AveragedModel(
            self.model,
            multi_avg_fn=get_ema_multi_avg_fn(0.99),  # pyright: ignore[reportUnknownArgumentType]
        )
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES + HELD_OUT, WIDTH, generator=generator, dtype=torch.float64)
        y = x.sum(1, keepdim=True).sin()
        self.data = (Streams if streams else TensorDataset)(x[:SAMPLES], y[:SAMPLES])
        self.held_out = TensorDataset(x[SAMPLES:], y[SAMPLES:])

    def update_average(self, step: holdfast.Step) -> None:
        """Update the average after an applied step."""
        self.average.update_parameters(self.model)

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the mean loss of a batch; its gradient overflows as it would in float16."""
        x, y = batch
        found = self.model(x)
        if found.requires_grad:
            found.register_hook(round_to_half)
        return nn.functional.mse_loss(found, y)

    def measure(self, batch: Any) -> dict[str, torch.Tensor]:
        """Return the loss of a batch in evaluation mode."""
        self.model.eval()
        return {"loss": self.loss(batch)}

    def digest(self) -> str:
        """Return a hash of all state."""
        state: list[Any] = [self.model, self.average, self.scaler]
        state += [*self.optimizers.values(), *self.schedules.values()]
        digest = hashlib.blake2b(digest_size=12)
        leaves = dict(_leaves("", [thing.state_dict() for thing in state]))
        for name, value in sorted(leaves.items(), key=lambda leaf: leaf[0]):
            digest.update(name.encode())
            digest.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
        return digest.hexdigest()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="minimum duration of a step on one worker")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--streams", action="store_true", help="read the data as streams")
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--best", type=int, default=0, help="number of best evaluated states to keep")
    parser.add_argument("--hashes", type=Path, help="a file for lines of pid, step and the hash of the state")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job, training = holdfast.init(), Training(args.hidden, streams=args.streams)
    job.protect(
        training.model,
        training.optimizers,
        training.data,
        updates=("trunk", "head", "trunk"),
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        seed=3,
        num_workers=args.loader_workers,
        scaler=training.scaler,
        extra={**training.schedules, "average": training.average},
        after_apply=training.update_average,
    )
    job.evaluate(training.measure, training.held_out, every=EVALUATE_EVERY, save_top_k=args.best)
    hashes = os.open(args.hashes, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if args.hashes else None
    for step in job.steps(args.steps + 1):
        for batch in step.micro_batches():
            time.sleep(args.step_seconds * MICRO_BATCH / GLOBAL_BATCH)
            loss = training.loss(batch)
            step.log({"largest": loss}, reduce="max")
            step.backward(loss)
        if step.number == args.steps and job.rank == 0:
            job.stop("enough")
        if step.apply() and hashes is not None:
            os.write(hashes, f"{os.getpid()} {step.number} {training.digest()}\n".encode())


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all leaves of nested state with their paths."""
    children: Any = ()
    if isinstance(value, dict):
        children = cast(dict[Any, Any], value).items()
    elif isinstance(value, list | tuple):
        children = enumerate(cast(list[Any], value))
    else:
        yield name, value
    for key, child in children:
        yield from _leaves(f"{name}/{key}", child)


if __name__ == "__main__":
    main()
