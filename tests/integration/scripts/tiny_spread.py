"""Trains a small model with replicas over one or more workers of a node, by layout; writes its losses if requested."""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--shard", type=int, default=1)
parser.add_argument(
    "--shard-from", action="append", default=[], help="NODES:SHARD: use this shard size with at least NODES nodes"
)
parser.add_argument("--tensor", type=int, default=1)
parser.add_argument("--step-seconds", type=float, default=0.0, help="make a step of one worker take this long")
parser.add_argument("--hidden", type=int, default=32, help="the width of the model")
parser.add_argument("--experts", type=int, default=0, help="experts of an MoE layer in each block, 0 for none")
parser.add_argument("--losses", help="write this worker's view of the losses here")
args = parser.parse_args()

torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
x = torch.randn(96, 8, generator=generator, dtype=torch.float64)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())

layouts = {1: holdfast.Layout(shard=args.shard, tensor=args.tensor)}
for nodes, shard in (map(int, pair.split(":")) for pair in args.shard_from):
    layouts[nodes] = holdfast.Layout(shard=shard, tensor=args.tensor)
job = holdfast.init(layout=layouts)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, args.hidden), torch.nn.Linear(args.hidden, 8)
        if args.experts:
            gate = holdfast.TopKGate(args.experts, 2, score="sigmoid", bias_rate=0.01)
            self.moe = holdfast.MoE(8, 16, args.experts, 2, gate=gate, shared=torch.nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(self.norm(x)).relu())
        return x + self.moe(x) if args.experts else x


# The 5 rows cannot be divided into equal parts.
model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(8, 5), torch.nn.Linear(5, 1))
model.to(job.device, torch.float64)
if args.tensor > 1:
    for block in model[:2]:
        parallelize_module(block, job.mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
if job.layout.shard > 1:
    experts = {weight for block in model[:2] if args.experts for weight in block.moe.experts.parameters()}
    for module in (*model[:2], model):
        fully_shard(module, mesh=job.mesh["shard"], ignored_params=experts)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.protect(model, optimizer, data, global_batch=24, micro_batch=4, max_grad_norm=1.0, seed=3)
held_out = torch.utils.data.Subset(data, range(22))
job.evaluate(lambda batch: {"loss": torch.nn.functional.mse_loss(model(batch[0]), batch[1])}, held_out, every=3)
losses: list[float] = []
metrics: list[dict[str, float]] = []
for step in job.steps(args.steps):
    for inputs, wanted in step.micro_batches():
        time.sleep(args.step_seconds * 4 / 24)
        step.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
        step.log({"seen": float(inputs.sum())}, reduce="sum")
    if step.apply():
        losses.append(step.loss)
        metrics.append(dict(step.metrics))
if args.losses:
    with open(args.losses, "w") as file:
        json.dump({"pid": os.getpid(), "losses": losses, "metrics": metrics}, file)
