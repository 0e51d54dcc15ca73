"""Two optimizers in turns, one with all parameters frozen for some steps, for jobs and for a plain loop."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from changing import DATA, MICRO_BATCHES
from torch.nn import Linear
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR

import holdfast
from holdfast.runtime.session.job import Job

STEPS = 12
#: "d" is frozen before the first of these steps, and trains again from the second one on.
FROZEN = (4, 9)
NORM = 0.1


class Turns:
    """A body, and a head with a loss that does not reach the body; with experts, each loss depends on them."""

    def __init__(self, experts: int = 0) -> None:
        torch.manual_seed(0)
        self.experts = experts
        body = torch.nn.Sequential(Linear(8, 8), holdfast.MoE(8, 8, experts, seed=5)) if experts else Linear(8, 8)
        self.model = torch.nn.ModuleDict({"g": body, "d": Linear(8, 1)}).double()
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "g": torch.optim.AdamW(self.model["g"].parameters(), lr=0.01),
            "d": torch.optim.SGD(self.model["d"].parameters(), lr=0.05, momentum=0.9, weight_decay=0.1),
        }
        self.schedule = ExponentialLR(self.optimizers["d"], 0.9)

    def change(self, step: int) -> None:
        if step in FROZEN:
            self.model["d"].requires_grad_(step == FROZEN[1])

    def loss(self, update: str, batch: Any) -> torch.Tensor:
        x, y = batch
        with torch.no_grad() if update == "d" and not self.experts else nullcontext():
            h = torch.tanh(self.model["g"](x))
        return mse_loss(self.model["d"](h), y)

    @property
    def numbers(self) -> list[float]:
        """The weights outside the experts."""
        kept = [p for name, p in self.model.named_parameters() if "experts" not in name]
        return torch.cat([p.detach().flatten() for p in kept]).tolist()

    def train(self, job: Job, *, clips: bool = False, scaler: torch.amp.GradScaler | None = None) -> dict[int, float]:
        """Train as a job's worker, and return the loss of each step applied here."""
        job.protect(
            self.model,
            self.optimizers,
            DATA,
            global_batch=24,
            micro_batch=4,
            max_grad_norm=NORM if clips else None,
            scaler=scaler,
            extra={"schedule": self.schedule},
            after_apply=lambda step: self.change(step.number + 1),
        )
        losses: dict[int, float] = {}
        for step in job.steps(STEPS):
            for batch in step.micro_batches():
                loss = self.loss(step.update, batch)
                step.log({"sum": loss.detach()}, reduce="sum")
                step.backward(loss)
            if step.apply():
                losses[step.number] = step.loss
                assert abs(step.metrics["sum"] - MICRO_BATCHES * step.loss) < 1e-9
        return losses

    def train_plainly(self, *, clips: bool = False) -> dict[int, float]:
        """Train as a plain loop does, on holdfast's samples."""
        data, other = Job(None), Linear(1, 1)
        data.protect(other, torch.optim.SGD(other.parameters(), lr=0.1), DATA, global_batch=24, micro_batch=4)
        assert data._session is not None
        losses: dict[int, float] = {}
        for number in range(1, STEPS + 1):
            update = "gd"[(number - 1) % 2]
            self.change(number)
            self.model.zero_grad()
            losses[number] = 0.0
            for micro_batch in range(MICRO_BATCHES):
                batch = data._session.workload.loader.load(number, micro_batch)
                loss = self.loss(update, batch) / MICRO_BATCHES
                if loss.requires_grad:
                    loss.backward()
                losses[number] += float(loss.detach())
            if clips:
                torch.nn.utils.clip_grad_norm_(self.model[update].parameters(), NORM)
            self.optimizers[update].step()
            if update == "d":
                self.schedule.step()
        return losses


def train(directory: str, node: str, options: dict[str, Any]) -> None:
    """Train as every worker does."""
    torch.set_num_threads(1)
    job, script = holdfast.init(), Turns(options["experts"])
    script.train(job)
    (Path(directory) / f"{node}.json").write_text(json.dumps(script.numbers))
