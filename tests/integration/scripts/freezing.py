"""Freezes a layer at step 5; at step 15 unfreezes it and adds a new layer to the optimizer."""

from __future__ import annotations

import argparse
import json
import os
import time

import torch

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--step-seconds", type=float, default=0.0)
parser.add_argument("--losses", help="write this worker's view of the losses here")
args = parser.parse_args()

torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
x = torch.randn(96, 8, generator=generator, dtype=torch.float64)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())

job = holdfast.init()
first, second, last = (torch.nn.Linear(8, size, dtype=torch.float64) for size in (8, 8, 1))
second.requires_grad_(False)
model = torch.nn.Sequential(first, torch.nn.Tanh(), second, torch.nn.Tanh(), last).to(job.device)
optimizer = torch.optim.AdamW([*first.parameters(), *last.parameters()], lr=0.02)


def change(step: holdfast.Step) -> None:
    if step.number == 5:
        first.requires_grad_(False)
    if step.number == 15:
        first.requires_grad_(True)
        second.requires_grad_(True)
        optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.01})


job.protect(model, optimizer, data, global_batch=16, micro_batch=4, after_apply=change)
losses = []
for step in job.steps(args.steps):
    for inputs, wanted in step.micro_batches():
        time.sleep(args.step_seconds / 4)
        step.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
    if step.apply():
        losses.append(step.loss)
if args.losses:
    with open(args.losses, "w") as file:
        json.dump({"pid": os.getpid(), "losses": losses}, file)
