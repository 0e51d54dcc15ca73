"""Train a GPT with torch.compile."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from parts.gpt import GPT, loss_of
from parts.setting import parse_steps, seed_all
from parts.text import Text, read_text
from torch.utils.data import DataLoader

CONTEXT = 32
#: torch's default "inductor" needs a C++ compiler and a minute; this backend needs neither.
BACKEND = "aot_eager"


def main() -> None:
    steps = parse_steps(__doc__, 60)
    seed_all(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpt = GPT(context=CONTEXT).to(device)
    model: Any = torch.compile(gpt, backend=BACKEND)  # pyright: ignore[reportUnknownMemberType]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Text(read_text(), CONTEXT), batch_size=12, shuffle=True)
    for number, (inputs, targets) in enumerate(islice(loader, steps), start=1):
        loss = loss_of(model, inputs.to(device), targets.to(device))
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    main()
