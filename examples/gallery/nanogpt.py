"""nanoGPT's training loop, with an evaluation.

With parameter groups, warm-up and cosine decay, accumulation, training curves, and the best model.
"""

from __future__ import annotations

import math

import torch
from parts.evaluation import measure
from parts.gpt import GPT, loss_of
from parts.setting import parse_steps, seed_all
from parts.text import Text, read_text
from torch.utils.data import DataLoader

import holdfast

CONTEXT = 32
ACCUMULATE = 4
WARM_UP = 10
EVALUATE_EVERY = 20


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices, but not for biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))


def learning_rate(step: int, steps: int) -> float:
    """Return the factor on the full rate after a number of steps: linear warm-up, then cosine decay to a tenth."""
    if step < WARM_UP:
        return (step + 1) / (WARM_UP + 1)
    passed = (step - WARM_UP) / max(1, steps - WARM_UP)
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, passed)))


def main() -> None:
    steps = parse_steps(__doc__, 60)
    seed_all(0)
    job = holdfast.init(checkpoint_dir="out/nanogpt")
    device = job.device
    text = read_text()
    train, held_out = Text(text[:-2049], CONTEXT), Text(text[-2049:], CONTEXT)
    model = GPT(context=CONTEXT).to(device)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    loader, extra = DataLoader(train, batch_size=4, shuffle=True), {"scheduler": scheduler}
    job.protect(model, optimizer, loader, global_batch=4 * ACCUMULATE, micro_batch=4, max_grad_norm=1.0, extra=extra)
    job.evaluate(lambda batch: measure(model, batch), held_out, every=EVALUATE_EVERY, save_top_k=1)
    for step in job.steps(steps):
        for inputs, targets in step.micro_batches():
            loss = loss_of(model, inputs.to(device), targets.to(device))
            step.backward(loss)
        step.log({"learning_rate": scheduler.get_last_lr()[0]})
        if step.apply() and job.rank == 0:
            print(f"step {step.number} loss {step.loss:.9g}", flush=True)


if __name__ == "__main__":
    main()
