"""A data set with one sample that takes a second to load, in each epoch of 20 steps."""

from __future__ import annotations

import time

import torch

import holdfast


class Data(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(320, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 7:
            time.sleep(1.0)
        return self.x[index], self.x[index].sum().sin()


torch.manual_seed(0)
job = holdfast.init()
model = torch.nn.Linear(8, 1, dtype=torch.float64)
job.protect(model, torch.optim.AdamW(model.parameters(), lr=0.02), Data(), global_batch=16, micro_batch=2, seed=5)
for step in job.steps(100):
    for inputs, wanted in step.micro_batches():
        step.backward((model(inputs).squeeze(1) - wanted).square().mean())
        time.sleep(0.02)
    step.apply()
