"""Train a GPT in float16 with a GradScaler.

With autocast and gradient accumulation.
"""

from __future__ import annotations

from itertools import islice

import torch
from parts.gpt import GPT, loss_of
from parts.setting import parse_steps, seed_all
from parts.text import Text, read_text
from torch.utils.data import DataLoader

CONTEXT = 32
ACCUMULATE = 4


def main() -> None:
    steps = parse_steps(__doc__, 60)
    seed_all(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(context=CONTEXT).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type)
    loader = DataLoader(Text(read_text(), CONTEXT), batch_size=4, shuffle=True)
    batches = iter(loader)
    for number in range(1, steps + 1):
        total = 0.0
        for inputs, targets in islice(batches, ACCUMULATE):
            with torch.autocast(device.type, dtype=torch.float16):
                loss = loss_of(model, inputs.to(device), targets.to(device))
            scaler.scale(loss / ACCUMULATE).backward()  # pyright: ignore[reportUnknownMemberType]
            total += loss.item() / ACCUMULATE
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"step {number} loss {total:.9g}", flush=True)


if __name__ == "__main__":
    main()
