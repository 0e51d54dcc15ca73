"""The loss on held-out text, and a folder for training curves and for the best model so far."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from parts.gpt import loss_of
from torch.utils.data import DataLoader, Dataset

Batch = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def measure(model: torch.nn.Module, batch: Batch) -> dict[str, float]:
    """Return the mean loss of a batch, and leave the model in training mode."""
    device = next(model.parameters()).device
    inputs, targets = (tensor.to(device) for tensor in batch)
    model.eval()
    loss = loss_of(model, inputs, targets).item()
    model.train()
    return {"loss": loss}


def evaluate(model: torch.nn.Module, held_out: Dataset[Batch]) -> float:
    """Return the mean loss of a data set whose length is a multiple of 16."""
    losses = [measure(model, batch)["loss"] for batch in DataLoader(held_out, batch_size=16)]
    return sum(losses) / len(losses)


class RunFolder:
    """Records scalars with the interface of torch.utils.tensorboard's SummaryWriter, and keeps the best model."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.mkdir(parents=True, exist_ok=True)
        self._curves = (self._path / "curves.jsonl").open("w")
        self._best = math.inf

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Add a point to the curve `tag`."""
        self._curves.write(json.dumps({"step": global_step, "tag": tag, "value": scalar_value}) + "\n")
        self._curves.flush()
        print(f"step {global_step} {tag} {scalar_value:.9g}", flush=True)

    def evaluated(self, model: torch.nn.Module, loss: float, step: int) -> None:
        """Add a loss to its curve, and save the weights if it is the lowest so far."""
        self.add_scalar("eval/loss", loss, step)
        if loss < self._best:
            self._best = loss
            torch.save(model.state_dict(), self._path / "best.pt")
