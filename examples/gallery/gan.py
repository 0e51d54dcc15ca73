"""Train a GAN: two optimizers that take turns.

The data are points on a ring.
"""

from __future__ import annotations

import torch
from parts.points import Points, loss_of, make_networks
from parts.setting import parse_steps, seed_all
from torch.utils.data import DataLoader

import holdfast

TURNS = ("critic", "generator")


def main() -> None:
    steps = parse_steps(__doc__, 60)
    seed_all(0)
    job = holdfast.init()
    device = job.device
    networks = make_networks().to(device)
    optimizers = {name: torch.optim.Adam(networks[name].parameters(), lr=1e-3, betas=(0.5, 0.9)) for name in TURNS}
    loader = DataLoader(Points(8192), batch_size=16, shuffle=True)
    job.protect(networks, optimizers, loader, updates=TURNS, global_batch=48, micro_batch=16)
    for step in job.steps(steps):
        for points, noise in step.micro_batches():
            step.backward(loss_of(networks, step.update, points, noise))
        if step.apply() and job.rank == 0:
            print(f"step {step.number} {step.update} loss {step.loss:.9g}", flush=True)


if __name__ == "__main__":
    main()
