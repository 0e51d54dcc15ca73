"""Train a GPT, and average its weights (EMA).

The average is torch's own AveragedModel.
"""

from __future__ import annotations

from itertools import islice

import torch
from parts.gpt import GPT, loss_of
from parts.setting import parse_steps, seed_all
from parts.text import Text, read_text
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

CONTEXT = 32


def main() -> None:
    steps = parse_steps(__doc__, 60)
    seed_all(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(context=CONTEXT).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))  # pyright: ignore[reportUnknownArgumentType]
    loader = DataLoader(Text(read_text(), CONTEXT), batch_size=12, shuffle=True)
    for number, (inputs, targets) in enumerate(islice(loader, steps), start=1):
        loss = loss_of(model, inputs.to(device), targets.to(device))
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        optimizer.zero_grad()
        average.update_parameters(model)
        print(f"step {number} loss {loss.item():.9g}", flush=True)
    print(f"average norm {sum(p.square().sum().item() for p in average.parameters()):.9g}", flush=True)


if __name__ == "__main__":
    main()
