"""nanoGPT's training loop, with an evaluation.

With parameter groups, warm-up and cosine decay, accumulation, training curves, and the best model.
"""

from __future__ import annotations

import math

import torch
from parts.evaluation import RunFolder, evaluate
from parts.gpt import GPT, loss_of
from parts.setting import parse_steps, seed_all
from parts.text import Text, read_text
from torch.utils.data import DataLoader

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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = read_text()
    train, held_out = Text(text[:-2049], CONTEXT), Text(text[-2049:], CONTEXT)
    model = GPT(context=CONTEXT).to(device)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    run, losses = RunFolder("out/nanogpt"), list[float]()
    batches = iter(DataLoader(train, batch_size=4, shuffle=True))
    for number in range(1, steps + 1):
        for inputs, targets in (next(batches) for _ in range(ACCUMULATE)):
            loss = loss_of(model, inputs.to(device), targets.to(device))
            (loss / ACCUMULATE).backward()  # pyright: ignore[reportUnknownMemberType]
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        scheduler.step()
        optimizer.zero_grad()
        run.add_scalar("loss", sum(losses[-ACCUMULATE:]) / ACCUMULATE, number)
        if number % EVALUATE_EVERY == 0:
            run.evaluated(model, evaluate(model, held_out), number)


if __name__ == "__main__":
    main()
