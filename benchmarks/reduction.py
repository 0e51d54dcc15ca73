"""Compare the reduction of a 4.6 M-parameter fp32 model on 4 ranks with gloo's all-reduce, in the same processes.

Both sides clip by the gradient norm: holdfast gets the norm from the shards (its commit operation is timed too), the
other side calls `clip_grad_norm_`. The two alternate. Printed are the median and the range over all steps of rank 0.

    OMP_NUM_THREADS=1 python benchmarks/reduction.py [--ranks 4] [--steps 40] [--parameters 4600000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from holdfast.runtime.groups.commit import finish_commit, start_commit
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.groups.transports.torch_group import GroupCommunicator
from holdfast.runtime.reduction.reduction import GradientBuckets, reduce_gradients
from tests.harness.local_world import Seat, run_world

WARM_UP = 5


def model_of(parameters: int) -> nn.Module:
    """Return a stack of square layers with about this many parameters, similar to a small transformer."""
    width = 384
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(max(parameters // (width * width + width), 1))))


def ours(comm: Communicator, buckets: GradientBuckets) -> None:
    v = reduce_gradients([buckets], comm, 1.0 / comm.size, 1.0)
    finish_commit(start_commit(comm), v)


def all_reduce(group: Any, flat: torch.Tensor, model: nn.Module) -> None:
    group.allreduce([flat]).wait()
    flat.div_(group.size())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def measure(seat: Seat, parameters: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of each step, by side."""
    comm = seat.connect(1)
    assert isinstance(comm, GroupCommunicator)
    group = comm._group  # pyright: ignore[reportPrivateUsage] - torch's own, under ours
    model, peer = model_of(parameters), model_of(parameters)
    buckets = GradientBuckets(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in peer.parameters()))
    offset = 0
    for p in peer.parameters():
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    gradients = torch.randn_like(flat) + seat.rank
    sides: dict[str, Callable[[], None]] = {
        "ours": lambda: ours(comm, buckets),
        "all_reduce": lambda: all_reduce(group, flat, peer),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(steps + WARM_UP):
        for name, side in sides.items():
            flat.copy_(gradients)
            buckets.collect()
            comm.wait(comm.start_all_gather(torch.empty(comm.size), torch.ones(1)))
            started = time.perf_counter()
            side()
            if step >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    comm.retire(sever=False)
    seat.reaper.wait_empty(10)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--parameters", type=int, default=4_600_000)
    arguments = parser.parse_args()
    seconds = run_world(arguments.ranks, measure, arguments.parameters, arguments.steps, timeout_s=600)[0]
    print(f"{arguments.parameters} parameters, {arguments.ranks} ranks, {arguments.steps} steps; ms median (min..max)")
    for name, values in seconds.items():
        low, high = min(values) * 1e3, max(values) * 1e3
        print(f"{name:12} {statistics.median(values) * 1e3:7.1f} ({low:.1f}..{high:.1f})")
    ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["all_reduce"], strict=True))
    print(f"ours / all_reduce, median of the steps' ratios: {ratio:.2f}")


if __name__ == "__main__":
    main()
