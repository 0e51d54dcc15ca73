"""Train a GAN: two optimizers that take turns.

The data are points on a ring.
"""

from __future__ import annotations

from itertools import islice

import torch
from parts.points import Points, loss_of, make_networks
from parts.setting import parse_steps, seed_all
from torch.utils.data import DataLoader

TURNS = ("critic", "generator")


def main() -> None:
    steps = parse_steps(__doc__, 60)
    seed_all(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    networks = make_networks().to(device)
    optimizers = {name: torch.optim.Adam(networks[name].parameters(), lr=1e-3, betas=(0.5, 0.9)) for name in TURNS}
    loader = DataLoader(Points(8192), batch_size=48, shuffle=True)
    for number, (points, noise) in enumerate(islice(loader, steps), start=1):
        turn = TURNS[(number - 1) % len(TURNS)]
        loss = loss_of(networks, turn, points.to(device), noise.to(device))
        networks.zero_grad()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        optimizers[turn].step()  # pyright: ignore[reportUnknownMemberType]
        print(f"step {number} {turn} loss {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    main()
