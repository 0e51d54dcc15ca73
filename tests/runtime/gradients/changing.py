"""A script that changes its parameters and options in mid-training: for one process, several, and a plain loop."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import Linear
from torch.nn.functional import mse_loss

import holdfast
from holdfast.runtime.session.job import Job

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True).sin())
MICRO_BATCHES = 6


class Changing:
    """Layers, some initially without an optimizer, and optionally experts."""

    def __init__(self, experts: int = 0) -> None:
        torch.manual_seed(0)
        mixed = holdfast.MoE(8, 8, experts, seed=5) if experts else torch.nn.Tanh()
        layers = {name: Linear(8, 8) for name in "abc"} | {"mixed": mixed, "last": Linear(8, 1)}
        self.model = torch.nn.ModuleDict(layers).double()
        for name in "bc":
            self.model[name].requires_grad_(False)
        first = [p for name in ("a", "mixed") for p in self.model[name].parameters()]
        rate = torch.tensor(0.02, dtype=torch.float64)
        last = {"params": list(self.model["last"].parameters()), "lr": rate, "betas": [0.9, 0.99]}
        self.optimizer = torch.optim.Adam([{"params": first}, last], lr=0.01)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        for name in ("a", "b", "c"):
            x = torch.tanh(self.model[name](x))
        return mse_loss(self.model["last"](x + self.model["mixed"](x)), y)

    def add(self, name: str, **options: Any) -> None:
        self.model[name].requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.model[name].parameters()), **options})

    def change(self, step: int) -> None:
        """Make the changes that are due before a step."""
        first, last = self.optimizer.param_groups[:2]
        if step == 1:
            self.add("b", lr=0.005)
        if step == 4:
            first["lr"] *= 0.5
            last["lr"].mul_(0.5)
            last["betas"][0] -= 0.1
            first["noted"] = True
            self.model["a"].requires_grad_(False)
        if step == 7:
            self.model["a"].requires_grad_(True)
            self.add("c", amsgrad=True)

    @property
    def numbers(self) -> list[float]:
        """The weights outside the experts, and the options that change."""
        kept = [p for name in ("a", "b", "c", "last") for p in self.model[name].parameters()]
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return [*torch.cat([p.detach().flatten() for p in kept]).tolist(), *rates]


def train(directory: str, node: str, options: dict[str, Any]) -> None:
    """Train as every worker; the last line holds the result."""
    torch.set_num_threads(1)
    job, script = holdfast.init(), Changing(options.get("experts", 0))
    in_loop = options["in_loop"]
    rate = script.optimizer.param_groups[1]["lr"]
    job.protect(
        script.model,
        script.optimizer,
        DATA,
        global_batch=24,
        micro_batch=4,
        after_apply=None if in_loop else lambda step: script.change(step.number + 1),
    )
    losses: list[float] = []
    for step in job.steps(options["steps"]):
        while step.number in options.get("gates", ()) and not (Path(directory) / f"go{step.number}").exists():
            time.sleep(0.005)
        if in_loop:
            script.change(step.number)
        for batch in step.micro_batches():
            step.backward(script.loss(batch))
        if step.apply():
            losses.append(step.loss)
    path = Path(directory) / f"{node}.json"
    path.write_text(json.dumps({"losses": losses, "numbers": script.numbers}))
    if options.get("same_rate"):
        assert script.optimizer.param_groups[1]["lr"] is rate


def train_plainly(steps: int, *, experts: int = 0, first: int = 1) -> tuple[dict[int, float], list[float]]:
    """Train as a plain loop does, on holdfast's samples; changes begin with the step `first`."""
    script, data = Changing(experts), Job(None)
    model = torch.nn.Linear(1, 1)
    data.protect(model, torch.optim.SGD(model.parameters(), lr=0.1), DATA, global_batch=24, micro_batch=4)
    assert data._session is not None
    losses: dict[int, float] = {}
    for number in range(1, steps + 1):
        if number >= first:
            script.change(number)
        script.optimizer.zero_grad()
        losses[number] = 0.0
        for micro_batch in range(MICRO_BATCHES):
            loss = script.loss(data._session.workload.loader.load(number, micro_batch)) / MICRO_BATCHES
            loss.backward()
            losses[number] += float(loss.detach())
        script.optimizer.step()
    return losses, script.numbers
