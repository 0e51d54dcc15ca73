"""A training script with emulated accelerators: a step takes a stated time and almost no processor time.

Any number of ranks can therefore share a few cores, and the training does not hide the cost of the job itself.

    holdfast run --nodes 4 benchmarks/paced.py --step-seconds 1
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

SAMPLES, FEATURES, WIDTH = 4096, 16, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--step-seconds", type=float, default=1.0)
    parser.add_argument("--micro-batches", type=int, default=256, help="micro-batches per step, of one sample each")
    options = parser.parse_args()
    x = torch.arange(SAMPLES * FEATURES, dtype=torch.float32).sin().view(SAMPLES, FEATURES)
    job = holdfast.init()
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job.protect(
        model,
        optimizer,
        TensorDataset(x, x.sum(1)),
        global_batch=options.micro_batches,
        micro_batch=1,
        max_grad_norm=1.0,
    )
    for step in job.steps(options.steps):
        for inputs, wanted in step.micro_batches():
            rounds = -(-options.micro_batches // job.world_size)
            time.sleep(options.step_seconds / rounds)
            step.backward(F.mse_loss(model(inputs).squeeze(1), wanted))
        step.apply()


if __name__ == "__main__":
    main()
