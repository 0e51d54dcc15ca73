"""A script that uses all features at once, for jobs of several processes: it tests every pair of features."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from cluster import Streams
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast
from holdfast.runtime.moe.gates.routing import routing_from_loads

UPDATES = ("trunk", "head", "trunk")
GRAIN = 2.0**24
#: Large enough that some steps overflow, including later ones.
SCALE = 2.0**21
DIM, BATCH, EVERY = 8, 4, 5


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the nearest multiples of 2**-24, which sum exactly in any order."""
    return (tensor * GRAIN).round() / GRAIN


def narrowed(gradient: torch.Tensor) -> torch.Tensor:
    """Make a gradient overflow as it would in float16."""
    return gradient.half().to(gradient.dtype)


class Trunk(nn.Module):
    """Running statistics, dropout, and optionally experts."""

    def __init__(self, experts: int, hot: float) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)
        self.mixed: nn.Module = nn.Linear(DIM, DIM)
        if experts:
            gate = holdfast.TopKGate(experts, 2, score="sigmoid", bias_rate=0.01)
            routing = routing_from_loads([hot, *[(1.0 - hot) / (experts - 1)] * (experts - 1)], 2) if hot else None
            self.mixed = holdfast.MoE(DIM, 2 * DIM, experts, 2, gate=gate, jitter=0.02, seed=5, routing=routing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.norm(self.first(x)), 0.1, self.training)
        return x + torch.tanh(self.mixed(x))


class Everything:
    """Two optimizers in turns, schedules, an average of the weights, and a loss scale."""

    def __init__(self, experts: int, hot: float) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"trunk": Trunk(experts, hot), "head": nn.Linear(DIM, 1)}).double()
        if not experts:
            for parameter in self.model.parameters():
                parameter.register_hook(rounded)
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "trunk": torch.optim.AdamW(self.model["trunk"].parameters(), lr=1e-2),
            "head": torch.optim.SGD(self.model["head"].parameters(), lr=1e-2, momentum=0.9),
        }
        self.schedules = {f"of {name}": CosineAnnealingLR(one, 50) for name, one in self.optimizers.items()}
        self.average = AveragedModel(self.model["head"], multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(60, DIM, generator=generator, dtype=torch.float64)
        self.y = self.x.sum(1, keepdim=True)

    def protect(self, job: holdfast.Job, **options: Any) -> None:
        """Protect all parts, with data from streams."""
        job.protect(
            self.model,
            self.optimizers,
            Streams(self.x, self.y),
            updates=UPDATES,
            global_batch=6 * BATCH,
            micro_batch=BATCH,
            seed=3,
            scaler=self.scaler,
            extra={**self.schedules, "average": self.average},
            after_apply=lambda step: self.average.update_parameters(self.model["head"]),
            **options,
        )

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch; its gradient may overflow."""
        x, y = batch
        found = self.model["head"](self.model["trunk"](x))
        if found.requires_grad:
            found.register_hook(narrowed)
        return nn.functional.mse_loss(found, y)

    def measure(self, batch: Any) -> dict[str, torch.Tensor]:
        """Evaluate a batch."""
        self.model.eval()
        return {"loss": rounded(self.loss(batch))}


def train(directory: str, node: str, options: dict[str, Any]) -> None:
    """Train as every worker; write the number and the logged values of each applied step as a line of JSON."""
    torch.set_num_threads(1)
    job, every = holdfast.init(), Everything(options.get("experts", 0), options.get("hot", 0.0))
    norm = options.get("max_grad_norm")
    every.protect(job, max_grad_norm=norm, num_workers=options.get("loader_workers", 0))
    held_out = torch.utils.data.TensorDataset(every.x[:22], every.y[:22])
    job.evaluate(every.measure, held_out, every=EVERY)
    with (Path(directory) / f"{node}.jsonl").open("a") as file:
        for step in job.steps(1_000_000):
            while step.number in options.get("gates", ()) and not (Path(directory) / f"go{step.number}").exists():
                time.sleep(0.005)
            for batch in step.micro_batches():
                loss = every.loss(batch)
                step.log({"rows": float(batch[0].sum())}, reduce="sum")
                step.log({"largest": loss}, reduce="max")
                step.backward(loss + (rounded(loss) - loss).detach())
            if step.number == options["steps"] and job.rank == 0:
                job.stop("enough")
            if step.apply():
                print(json.dumps([step.number, step.update, step.metrics]), file=file, flush=True)
