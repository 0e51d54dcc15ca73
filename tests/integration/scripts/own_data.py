"""A small job with random data, which differ between nodes without a seed."""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import TensorDataset

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
options = parser.parse_args()

job = holdfast.init()
if options.seed is not None:
    torch.manual_seed(options.seed)
x = torch.randn(64, 8)
torch.seed()  # The model may differ, because its state is sent.
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
job.protect(model, optimizer, TensorDataset(x, x.sum(1, keepdim=True)), global_batch=16, micro_batch=4)
for step in job.steps(6):
    for a, b in step.micro_batches():
        step.backward((model(a) - b).square().mean())
    step.apply()
