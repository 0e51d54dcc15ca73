"""The loss on text that is not trained on, and the model that had the best one so far."""

from __future__ import annotations

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


class BestModel:
    """Evaluates a model now and then, and keeps the weights of the best evaluation in a file."""

    def __init__(self, model: torch.nn.Module, held_out: Dataset[Batch], path: Path) -> None:
        self.loss = math.inf
        self._model = model
        self._held_out = held_out
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def look(self) -> float:
        """Return the mean loss now; the best one's weights are saved."""
        losses = [measure(self._model, batch)["loss"] for batch in DataLoader(self._held_out, batch_size=16)]
        loss = sum(losses) / len(losses)
        if loss < self.loss:
            self.loss = loss
            torch.save(self._model.state_dict(), self._path)
        return loss
