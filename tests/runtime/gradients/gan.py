"""A generator and its critic, trained in turns: two updates of the critic, then one of the generator."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.runtime.session.step import Step

UPDATES = ("critic", "critic", "generator")
SCALE = 2.0**24
X = torch.randn(64, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the nearest multiples of 2**-24."""
    return (tensor * SCALE).round() / SCALE


class Followers:
    """State that follows the steps of a GAN: averages of the generator, a target critic, and a plateau schedule.

    It belongs into a script's after_apply, and all of it is state.
    """

    def __init__(self, gan: Gan) -> None:
        self.gan = gan
        generator, critic = gan.model["generator"], gan.model["critic"]
        self.moving = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        self.mean = AveragedModel(generator)
        self.target = copy.deepcopy(critic).requires_grad_(False)
        del gan.schedules["critic schedule"]
        self.plateau = ReduceLROnPlateau(gan.optimizers["critic"], factor=0.5, patience=0, threshold=0.0)

    @property
    def state(self) -> dict[str, Any]:
        """The objects to protect."""
        return {"moving": self.moving, "mean": self.mean, "target": self.target, "plateau": self.plateau}

    def follow(self, update: str, number: int, loss: float) -> None:
        """Update the followers after an applied step."""
        if update == "generator":
            self.moving.update_parameters(self.gan.model["generator"])
            if number > 6:
                self.mean.update_parameters(self.gan.model["generator"])
            return
        with torch.no_grad():
            for mine, new in zip(self.target.parameters(), self.gan.model["critic"].parameters(), strict=True):
                mine.lerp_(new, 0.25)
        self.plateau.step(loss)


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
        """Round every gradient to multiples of 2**-24, which sum exactly in any order."""
        for parameter in self.model.parameters():
            parameter.register_hook(rounded)

    def loss(self, update: str, real: torch.Tensor) -> torch.Tensor:
        """Return the loss of an update over one micro-batch."""
        made = self.model["generator"](torch.randn(len(real), 2, dtype=real.dtype))
        if update == "generator":
            return -self.model["critic"](made).mean()  # The critic's parameters get gradients as well.
        return self.model["critic"](made.detach()).mean() - self.model["critic"](real).mean()

    def protect(self, job: holdfast.Job, **options: Any) -> None:
        """Protect all parts."""
        arguments: dict[str, Any] = {"updates": UPDATES, "extra": self.schedules, "seed": 3, **options}
        job.protect(self.model, self.optimizers, TensorDataset(X), global_batch=24, micro_batch=4, **arguments)

    def compute(self, step: Step) -> None:
        """Compute a step's micro-batches."""
        for (real,) in step.micro_batches():
            loss = self.loss(step.update, real)
            step.backward(loss + (rounded(loss) - loss).detach())


def train(directory: str, node: str, options: dict[str, Any]) -> None:
    """Train as every worker of a job; write one line of JSON per applied step."""
    torch.set_num_threads(1)
    job, gan = holdfast.init(), Gan()
    followers = Followers(gan)
    gan.round_gradients()
    schedule = {"schedule": gan.schedules["generator schedule"]}
    gan.protect(
        job,
        extra={**schedule, **followers.state},
        after_apply=lambda step: followers.follow(step.update, step.number, step.loss),
    )
    with (Path(directory) / f"{node}.jsonl").open("a") as file:
        for step in job.steps(options["steps"]):
            while step.number in options.get("gates", ()) and not (Path(directory) / f"go{step.number}").exists():
                time.sleep(0.005)
            gan.compute(step)
            if step.apply():
                print(json.dumps([step.number, step.update]), file=file, flush=True)
