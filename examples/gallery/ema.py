"""Train a GPT, and average its weights (EMA).

The average is torch's own AveragedModel.
"""

from __future__ import annotations

import torch
from parts.gpt import GPT, loss_of
from parts.setting import parse_steps, seed_all
from parts.text import Text, read_text
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import holdfast

CONTEXT = 32


def main() -> None:
    steps = parse_steps(__doc__, 60)
    seed_all(0)
    job = holdfast.init()
    device = job.device
    model = GPT(context=CONTEXT).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))  # pyright: ignore[reportUnknownArgumentType]
    loader = DataLoader(Text(read_text(), CONTEXT), batch_size=4, shuffle=True)

    def update(_: holdfast.Step) -> None:
        average.update_parameters(model)

    extra = {"average": average}
    job.protect(model, optimizer, loader, global_batch=12, micro_batch=4, extra=extra, after_apply=update)
    for step in job.steps(steps):
        for inputs, targets in step.micro_batches():
            step.backward(loss_of(model, inputs, targets))
        if step.apply() and job.rank == 0:
            print(f"step {step.number} loss {step.loss:.9g}", flush=True)
    if job.rank == 0:
        print(f"average norm {sum(p.square().sum().item() for p in average.parameters()):.9g}", flush=True)


if __name__ == "__main__":
    main()
