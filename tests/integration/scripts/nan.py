"""A small job with a NaN loss after some step."""

from __future__ import annotations

import argparse
import time

import torch
from torch.utils.data import TensorDataset

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--nan-from", type=int, default=1 << 30)
options = parser.parse_args()

torch.manual_seed(0)
job = holdfast.init()
x = torch.randn(64, 8, dtype=torch.float64)
model = torch.nn.Linear(8, 1, dtype=torch.float64)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
job.protect(model, optimizer, TensorDataset(x, x.sum(1, keepdim=True)), global_batch=16, micro_batch=2)
for step in job.steps(options.steps):
    if step.number >= options.nan_from:
        time.sleep(0.5)  # Otherwise the coordinator receives several steps at once and stops the job later.
    for a, b in step.micro_batches():
        loss = (model(a) - b).square().mean()
        step.backward(loss * float("nan") if step.number >= options.nan_from else loss)
    step.apply()
