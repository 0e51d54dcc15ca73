"""Train a small ResNet on images, with loader workers.

With BatchNorm, gradient accumulation, SGD, a one-cycle schedule and an evaluation.
"""

from __future__ import annotations

from itertools import islice

import torch
from parts.images import Images, ResNet
from parts.setting import parse_steps, seed_all
from torch.nn import functional as F
from torch.utils.data import DataLoader

ACCUMULATE = 4


@torch.no_grad()
def accuracy(model: torch.nn.Module, device: torch.device) -> float:
    """Return the share of held-out images that the model classifies correctly, in evaluation mode."""
    model.eval()
    right = [
        (model(images.to(device)).argmax(1) == kinds.to(device)).float().mean().item()
        for images, kinds in DataLoader(Images(64), batch_size=16)
    ]
    model.train()
    return sum(right) / len(right)


def main() -> None:
    steps = parse_steps(__doc__, 40)
    seed_all(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ResNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=steps + 1)
    loader = DataLoader(Images(4096), batch_size=8, shuffle=True, num_workers=2)
    batches = iter(loader)
    for number in range(1, steps + 1):
        total = 0.0
        for images, kinds in islice(batches, ACCUMULATE):
            loss = F.cross_entropy(model(images.to(device)), kinds.to(device))
            (loss / ACCUMULATE).backward()  # pyright: ignore[reportUnknownMemberType]
            total += loss.item() / ACCUMULATE
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {number} loss {total:.9g}", flush=True)
    print(f"accuracy {accuracy(model, device):.3f}", flush=True)


if __name__ == "__main__":
    main()
