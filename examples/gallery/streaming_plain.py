"""Train a GPT on a stream, with loader workers.

Each loader worker reads one shard. With gradient accumulation.
"""

from __future__ import annotations

from itertools import islice

import torch
from parts.gpt import GPT, loss_of
from parts.setting import parse_steps, seed_all
from parts.stream import SourceStream
from torch.utils.data import DataLoader

CONTEXT = 32
ACCUMULATE = 4


def main() -> None:
    steps = parse_steps(__doc__, 60)
    seed_all(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(context=CONTEXT).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(SourceStream(CONTEXT), batch_size=4, num_workers=ACCUMULATE)
    batches = iter(loader)
    for number in range(1, steps + 1):
        total = 0.0
        for inputs, targets in islice(batches, ACCUMULATE):
            loss = loss_of(model, inputs.to(device), targets.to(device))
            (loss / ACCUMULATE).backward()  # pyright: ignore[reportUnknownMemberType]
            total += loss.item() / ACCUMULATE
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        optimizer.zero_grad()
        print(f"step {number} loss {total:.9g}", flush=True)


if __name__ == "__main__":
    main()
