"""Trains two small MoE layers with a learned gate; writes its losses if requested."""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
from averaging import Averaging

import holdfast
from holdfast.runtime.moe.gates.routing import RecordedRouting, routing_from_loads

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--experts", type=int, default=8)
parser.add_argument("--micro-batch", type=int, default=4)
parser.add_argument("--step-seconds", type=float, default=0.0, help="make a step of one worker take this long")
parser.add_argument("--gate", help="wait before step 5 until this file exists")
parser.add_argument("--hot", type=float, default=0.0, help="share of tokens that expert 0 gets; 0: the gate decides")
parser.add_argument("--gates", help="wait before steps 1, 11, 21, ... for FILE.1, FILE.11, FILE.21, ...")
parser.add_argument("--raise-at", type=int, default=0, help="after_apply raises at this step")
parser.add_argument("--raise-on", type=int, help="the rank that raises (default: all)")
parser.add_argument("--losses", help="write this worker's view of the losses here")
args = parser.parse_args()

torch.manual_seed(0)
GLOBAL_BATCH, DIM = 24, 8
generator = torch.Generator().manual_seed(1)
x = torch.randn(96, DIM, generator=generator, dtype=torch.float64)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())


def routing(top_k: int) -> RecordedRouting | None:
    """Return fixed assignments that give expert 0 the share of --hot, or None without --hot."""
    rest = (1 - args.hot) / (args.experts - 1)
    return routing_from_loads([args.hot] + [rest] * (args.experts - 1), top_k) if args.hot else None


class Tiny(torch.nn.Module):
    """A dense layer, an MoE layer balanced by a bias, an MoE layer balanced by a loss, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, 1)
        sizes = (DIM, 2 * DIM, args.experts)
        gate = holdfast.TopKGate(args.experts, 2, score="sigmoid", bias_rate=0.01)
        shared = torch.nn.Linear(DIM, DIM)
        gated = holdfast.MoE(*sizes, 2, gated=True, gate=gate, shared=shared, jitter=0.02, seed=5, routing=routing(2))
        plain = holdfast.MoE(*sizes, 1, aux_loss=0.01, seed=5, layer=1, routing=routing(1))
        self.moes = torch.nn.ModuleList((gated, plain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for moe in self.moes:
            x = x + moe(torch.nn.functional.dropout(x, 0.05, self.training))
        return self.last(x)

    def aux_loss(self) -> torch.Tensor:
        return torch.stack([moe.aux_loss for moe in self.moes]).sum()  # type: ignore[union-attr]


job = holdfast.init()
model = Tiny().to(job.device, torch.float64)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
averaging = Averaging(job, model.last, args.raise_at, args.raise_on)
job.protect(
    model,
    optimizer,
    data,
    global_batch=GLOBAL_BATCH,
    micro_batch=args.micro_batch,
    max_grad_norm=1.0,
    seed=3,
    extra={"average": averaging.average},
    after_apply=averaging,
)
losses = []
for step in job.steps(args.steps):
    while args.gate and step.number == 5 and not os.path.exists(args.gate):
        time.sleep(0.01)
    while args.gates and step.number % 10 == 1 and not os.path.exists(f"{args.gates}.{step.number}"):
        time.sleep(0.01)
    for inputs, wanted in step.micro_batches():
        time.sleep(args.step_seconds * args.micro_batch / GLOBAL_BATCH)
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        step.backward(loss + model.aux_loss())
    if step.apply():
        losses.append(step.loss)
if args.losses:
    with open(args.losses, "w") as file:
        json.dump({"pid": os.getpid(), "losses": losses}, file)
