"""A generator and its critic, trained in turns: two updates of the critic, then one of the generator."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import holdfast
from holdfast.runtime.session.step import Step

UPDATES = ("critic", "critic", "generator")
SCALE = 2.0**24
X = torch.randn(64, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class Gan:
    """The models, their optimizers and schedules, and the loss of each update."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        generator = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        critic = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        self.model = torch.nn.ModuleDict({"generator": generator, "critic": critic}).double()
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "generator": torch.optim.AdamW(self.model["generator"].parameters(), lr=1e-2),
            "critic": torch.optim.SGD(self.model["critic"].parameters(), lr=2e-2, momentum=0.9),
        }
        self.schedules = {
            f"{name} schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
            for name, optimizer in self.optimizers.items()
        }

    def round_gradients(self) -> None:
        """Let every micro-batch's gradients be multiples of 2**-24, whose sums are exact in whatever order."""
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient: (gradient * SCALE).round() / SCALE)

    def loss(self, update: str, real: torch.Tensor) -> torch.Tensor:
        """Return what an update makes smaller, over a micro-batch."""
        made = self.model["generator"](torch.randn(len(real), 2, dtype=real.dtype))
        if update == "generator":
            return -self.model["critic"](made).mean()  # (gradients of the critic's parameters come with it)
        return self.model["critic"](made.detach()).mean() - self.model["critic"](real).mean()

    def protect(self, job: holdfast.Job, **options: Any) -> None:
        """Protect all of it."""
        arguments: dict[str, Any] = {"updates": UPDATES, "extra": self.schedules, "seed": 3, **options}
        job.protect(self.model, self.optimizers, TensorDataset(X), global_batch=24, micro_batch=4, **arguments)

    def compute(self, step: Step) -> None:
        """Go through a step's micro-batches."""
        for (real,) in step.micro_batches():
            step.backward(self.loss(step.update, real))


def train(directory: str, node: str, options: dict[str, Any]) -> None:
    """What every worker of a job runs; one line of JSON per applied step."""
    torch.set_num_threads(1)
    job, gan = holdfast.init(), Gan()
    gan.round_gradients()
    gan.protect(job)
    with (Path(directory) / f"{node}.jsonl").open("a") as file:
        for step in job.steps(options["steps"]):
            while step.number in options.get("gates", ()) and not (Path(directory) / f"go{step.number}").exists():
                time.sleep(0.005)
            gan.compute(step)
            if step.apply():
                print(json.dumps([step.number, step.update]), file=file, flush=True)
