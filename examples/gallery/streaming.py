"""Train a GPT on a stream, with loader workers.

Each loader worker reads one shard. With gradient accumulation.
"""

from __future__ import annotations

import torch
from parts.gpt import GPT, loss_of
from parts.setting import parse_steps, seed_all
from parts.stream import SourceStream
from torch.utils.data import DataLoader

import holdfast

CONTEXT = 32
ACCUMULATE = 4


def main() -> None:
    steps = parse_steps(__doc__, 60)
    seed_all(0)
    job = holdfast.init()
    device = job.device
    model = GPT(context=CONTEXT).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(SourceStream(CONTEXT), batch_size=4)
    job.protect(model, optimizer, loader, global_batch=4 * ACCUMULATE, micro_batch=4, max_grad_norm=1.0)
    for step in job.steps(steps):
        for inputs, targets in step.micro_batches():
            loss = loss_of(model, inputs.to(device), targets.to(device))
            step.backward(loss)
        if step.apply() and job.rank == 0:
            print(f"step {step.number} loss {step.loss:.9g}", flush=True)


if __name__ == "__main__":
    main()
