"""Trains a tiny model and raises at a chosen point of the script."""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--where", default="", help="load, compute, optimizer, loop, exit, interrupt, before or done")
parser.add_argument("--at", type=int, default=0, help="the step, or the sample for load")
parser.add_argument("--node", default="", help="raise only on this node")
parser.add_argument("--once", default="", help="raise only while this file exists, and remove it")
parser.add_argument("--step-seconds", type=float, default=0.0)
args = parser.parse_args()


def may_raise(where: str, at: int) -> None:
    here = not args.node or f'"worker":"{args.node}/' in os.environ["HOLDFAST_WORKER"]
    if (where, at) != (args.where, args.at) or not here:
        return
    if args.once:
        try:
            os.remove(args.once)  # Only one process can remove the file.
        except FileNotFoundError:
            return
    if where == "exit":
        sys.exit(7)
    if where == "interrupt":
        raise KeyboardInterrupt
    if where == "done":
        sys.exit(0)
    raise ValueError(f"bad {where} {at}")


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 960

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        may_raise("load", index)
        x = torch.full((8,), index / 960, dtype=torch.float64)
        return x, x.sum().sin()[None]


class Optimizer(torch.optim.SGD):
    steps = 0

    def step(self, closure: None = None) -> None:
        super().step(closure)
        may_raise("optimizer", job_step)


torch.manual_seed(0)
job = holdfast.init()
model = torch.nn.Linear(8, 1).to(job.device, torch.float64)
job.protect(model, Optimizer(model.parameters(), lr=1e-2), Data(), global_batch=24, micro_batch=4, seed=3)
may_raise("before", 0)
may_raise("done", 0)
job_step = 0
for step in job.steps(args.steps):
    job_step = step.number
    for inputs, wanted in step.micro_batches():
        time.sleep(args.step_seconds / 6)
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        may_raise("compute", step.number)
        may_raise("exit", step.number)
        may_raise("interrupt", step.number)
        step.backward(loss)
    if step.apply():
        may_raise("loop", step.number)
