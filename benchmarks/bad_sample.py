"""A training script with one sample that always raises, run by benchmarks/ladder.py."""

from __future__ import annotations

import argparse

import torch

import holdfast

SAMPLES = 960


class Data(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Numbers and the sines of their sums; one index raises an error."""

    def __init__(self, bad: int) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self._bad:
            raise ValueError(f"sample {index} cannot be read")
        x = torch.full((8,), index / SAMPLES)
        return x, x.sum().sin()[None]


def main() -> None:
    """Train until the bad sample is read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bad", type=int, default=500)
    options = parser.parse_args()
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    job = holdfast.init()
    model = torch.nn.Linear(8, 1).to(job.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    job.protect(model, optimizer, Data(options.bad), global_batch=24, micro_batch=4, seed=3)
    for step in job.steps(1_000_000):
        for inputs, wanted in step.micro_batches():
            step.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
        step.apply()


if __name__ == "__main__":
    main()
