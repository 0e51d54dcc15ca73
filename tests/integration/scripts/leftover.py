"""Makes workers differ like code left from a plain loop: `random` learning rates, or an optimizer that `counts`."""

from __future__ import annotations

import argparse
import time

import torch

import holdfast


class Counting(torch.optim.SGD):
    """An optimizer with a counter outside of state_dict()."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        self.param_groups[0]["lr"] = 0.05 / (1 + 0.1 * self.calls)
        return super().step(closure)


parser = argparse.ArgumentParser()
parser.add_argument("line", choices=["random", "counts"])
parser.add_argument("--steps", type=int, default=1_000_000)
args = parser.parse_args()

torch.manual_seed(0)
x = torch.randn(64, 4, dtype=torch.float64)
job = holdfast.init()
model = torch.nn.Linear(4, 1, dtype=torch.float64).to(job.device)
optimizer = Counting(model.parameters(), lr=0.05)
job.protect(model, optimizer, torch.utils.data.TensorDataset(x), global_batch=12, micro_batch=2)
generator = torch.Generator()
generator.seed()
for step in job.steps(args.steps):
    for (inputs,) in step.micro_batches():
        time.sleep(0.02)
        step.backward(model(inputs).square().mean())
    step.apply()
    if args.line == "random":
        optimizer.param_groups[0]["lr"] = 0.05 * float(torch.rand((), generator=generator))
