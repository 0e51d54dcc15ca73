"""Compare an FSDP2 step on holdfast's outer group with one on torch's own gloo group, in the same processes.

    make bench-outer

Two GPTs with equal seeds are wrapped alike, one on a mesh of either kind. Blocks of steps alternate, and the order
changes from block to block. Rank 0 times each block from barrier to barrier. The benchmark also prints the processor
time of all ranks, which other work on the machine disturbs less. At the end both models must be equal up to rounding,
because sums are added in different orders.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import plain_torch
import torch
from standstill import SuspensionWatch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.runtime.layouts.outer_group import OuterGroup
from holdfast.runtime.layouts.registered import register, unregister
from holdfast.runtime.tensors import seed_all
from tests.harness.local_world import Seat, run_world

if TYPE_CHECKING:
    from dense_gpt import GPT

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

_DeviceMesh: Any = DeviceMesh
_fully_shard: Any = fully_shard
SIDES = ("holdfast", "torch")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="steps per block")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and step")
    options = parser.parse_args()
    with SuspensionWatch() as watch, tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        results = run_world(options.ranks, measure, options, folder, timeout_s=900)
        seen = watch.report()
    clocks, difference, size = results[0]
    print(f"{size} parameters, {options.ranks} ranks, {options.batch} x {options.context} bytes per rank and step")
    for place, what in enumerate(("wall time", "processor time")):
        sides = {side: [block[place] for block in clocks[side]] for side in SIDES}
        for side, values in sides.items():
            print(f"{what}, {side:9s} {format_spread(values, scale=1e3)} ms a step, {len(values)} x {options.steps}")
        ratios = [ours / theirs for ours, theirs in zip(sides["holdfast"], sides["torch"], strict=True)]
        print(f"{what}, holdfast / torch, block by block: {format_spread(ratios)}")
    print(f"largest difference of a parameter afterwards: {difference:.1e}")
    print(seen)


def format_spread(values: list[float], scale: float = 1.0) -> str:
    """Format the median and the extremes."""
    low, middle, high = (scale * value for value in (min(values), statistics.median(values), max(values)))
    return f"median {middle:.3f} (min {low:.3f}..max {high:.3f})"


def measure(seat: Seat, options: argparse.Namespace, folder: str) -> tuple[dict[str, list[list[float]]], float, int]:
    """Train both models alternately; return wall and processor seconds per step of each block, by side."""
    plain_torch.join_group(plain_torch.file_store(Path(folder) / "store", seat.size), rank=seat.rank, world=seat.size)
    group = OuterGroup("outer", seat.rank, seat.size)
    register(group, range(seat.size))
    group.swap(seat.connect(1))
    meshes = {
        "holdfast": _DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",)),
        "torch": init_device_mesh("cpu", (seat.size,), mesh_dim_names=("shard",)),
    }
    models = {side: sharded_gpt(options, meshes[side]) for side in SIDES}
    steps = {side: step_of(models[side], options, seat.rank) for side in SIDES}
    clocks: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    for block in range(options.blocks + 1):
        for side in SIDES if block % 2 else SIDES[::-1]:
            began = _clocks()
            for _ in range(options.steps):
                steps[side]()
            if block:  # the first of each warms up
                clocks[side].append([(now - then) / options.steps for now, then in zip(_clocks(), began, strict=True)])
    locals_of = [[_local(one) for one in models[side].parameters()] for side in SIDES]
    difference = max(float((a - b).abs().max()) for a, b in zip(*locals_of, strict=True) if a.numel())
    size = sum(one.numel() for one in models["torch"].parameters())
    plain_torch.barrier()
    group.retire_communicator(sever=False)
    unregister(group)
    plain_torch.leave_group()
    return clocks, difference, size


def sharded_gpt(options: argparse.Namespace, mesh: DeviceMesh) -> GPT:
    """Return a GPT with each block sharded, then the rest."""
    from dense_gpt import GPT

    seed_all(0)
    model = GPT(options.layers, options.dim, 4, options.context)
    for module in (*model.blocks, model):
        _fully_shard(module, mesh=mesh)
    return model


def step_of(model: GPT, options: argparse.Namespace, rank: int) -> Callable[[], None]:
    """Return a function that runs one step."""
    from dense_gpt import Bytes, loss_of, read_text

    data = Bytes(read_text(None), options.context)
    samples = [data[rank * options.batch + number] for number in range(options.batch)]
    batch = (torch.stack([one for one, _ in samples]), torch.stack([other for _, other in samples]))
    optimizer = plain_torch.adamw(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss_of(model, batch))
        optimizer.step()

    return step


def _local(parameter: Any) -> torch.Tensor:
    return parameter.detach().to_local()


def _clocks() -> tuple[float, float]:
    """Return the wall clock after a barrier, and the processor time of all ranks, in seconds."""
    used = torch.tensor([time.process_time()], dtype=torch.float64)
    plain_torch.all_reduce(used)
    return time.perf_counter(), used.item()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
