"""Train alone with two loader workers until killed; without `if __name__ ...`, and with a data set class of its own."""

from __future__ import annotations

import os
import time

import torch

import holdfast


class Own:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.02)  # Otherwise one loader worker may fetch everything if the other starts late.
        return torch.ones(1), os.getpid()


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, set[int]]:
    return torch.stack([value for value, _ in samples]), {pid for _, pid in samples}


job = holdfast.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model, optimizer, Own(), global_batch=4, micro_batch=2, num_workers=2, collate=collate)
seen: set[int] = set()
for step in job.steps(1_000_000):
    for x, pids in step.micro_batches():
        step.backward(model(x).sum())
        seen |= pids
    step.apply()
    if len(seen) == 3 or (len(seen) == 2 and os.getpid() not in seen):
        print("loader workers", *(seen - {os.getpid()}), flush=True)
        seen = set(range(4))  # This prevents a second print.
