"""Train a GPT with torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from parts.gpt import GPT, loss_of
from parts.setting import parse_steps, seed_all
from parts.text import Text, read_text
from torch.utils.data import DataLoader

import holdfast

CONTEXT = 32
#: torch's default "inductor" needs a C++ compiler and a minute; this backend needs neither.
BACKEND = "aot_eager"


def main() -> None:
    steps = parse_steps(__doc__, 60)
    seed_all(0)
    job = holdfast.init()
    device = job.device
    gpt = GPT(context=CONTEXT).to(device)
    model: Any = torch.compile(gpt, backend=BACKEND)  # pyright: ignore[reportUnknownMemberType]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Text(read_text(), CONTEXT), batch_size=4, shuffle=True)
    job.protect(model, optimizer, loader, global_batch=12, micro_batch=4, max_grad_norm=1.0)
    for step in job.steps(steps):
        for inputs, targets in step.micro_batches():
            step.backward(loss_of(model, inputs, targets))
        if step.apply() and job.rank == 0:
            print(f"step {step.number} loss {step.loss:.9g}", flush=True)


if __name__ == "__main__":
    main()
