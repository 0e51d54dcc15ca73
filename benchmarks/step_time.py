"""Compare step time with plain DDP: the same model, data, batch and clipping, in the same processes.

    make bench-step

Every worker of a holdfast job also holds a DDP replica in a separate gloo group. Blocks of steps alternate, so that
both sides run under the same conditions. Rank 0 times each block from barrier to barrier. The benchmark also prints the
processor time of all ranks, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from dense_gpt import Bytes
    from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

BLOCK = 10
#: Short enough for a step of 150-200 ms with 4 workers on 2 cores, at 4.8 M parameters.
CONTEXT = 16


def main() -> int:
    """Run the job and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=4)
    options = parser.parse_args()

    from standstill import SuspensionWatch

    from tests.harness.local_job import LocalJob

    with tempfile.TemporaryDirectory(prefix="holdfast-") as name:
        folder = Path(name)
        worker_args = ("--worker", str(folder), "--blocks", str(options.blocks), "--world", str(options.nodes))
        run = LocalJob(__file__, worker_args, options=("--nodes", str(options.nodes)), folder=folder)
        with SuspensionWatch() as watch, run as job:
            if job.wait_exit(timeout=900) != 0:
                raise SystemExit(job.story())
            seen = watch.report()
        times = json.loads((folder / "times.json").read_text())
    for what, sides in times.items():
        for kind, values in sides.items():
            print(f"{what}, {kind:9s} {format_spread(values, scale=1e3)} ms a step, {len(values)} blocks of {BLOCK}")
        ratios = [ours / theirs for ours, theirs in zip(sides["holdfast"], sides["ddp"], strict=True)]
        print(f"{what}, holdfast / DDP, block by block: {format_spread(ratios)}")
    print(seen)
    return 0


def format_spread(values: list[float], scale: float = 1.0) -> str:
    """Format the median and the extremes."""
    low, middle, high = (scale * value for value in (min(values), statistics.median(values), max(values)))
    return f"median {middle:.3f} (min {low:.3f}..max {high:.3f})"


def worker(folder: Path, blocks: int, world: int) -> None:
    """Train both alternately."""
    import plain_torch
    import torch.distributed as dist
    from dense_gpt import GPT, Bytes, loss_of, read_text
    from torch.nn.parallel import DistributedDataParallel

    import holdfast
    from holdfast.runtime.tensors import seed_all

    seed_all(0)
    job = holdfast.init()
    ours, theirs = GPT(6, 256, 4, CONTEXT), GPT(6, 256, 4, CONTEXT)
    our_optimizer = plain_torch.adamw(ours.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    their_optimizer = plain_torch.adamw(theirs.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    data = Bytes(read_text(None), CONTEXT)
    job.protect(ours, our_optimizer, data, global_batch=32, micro_batch=4, max_grad_norm=1.0)
    ddp: DistributedDataParallel | None = None
    times: dict[str, dict[str, list[float]]] = {
        what: {"holdfast": [], "ddp": []} for what in ("wall time", "processor time")
    }
    total = blocks * BLOCK + BLOCK
    shard = 8 // world  # micro-batches per rank and step, as in holdfast's round robin
    started = np.zeros(2)
    for step in job.steps(total):
        if ddp is None:
            plain_torch.join_group(plain_torch.file_store(folder / "store", world), rank=job.rank, world=world)
            ddp = DistributedDataParallel(theirs, gradient_as_bucket_view=True)
        if (step.number - 1) % BLOCK == 0:
            started = _clocks()
        for batch in step.micro_batches():
            step.backward(loss_of(ours, batch))
        step.apply()
        if step.number % BLOCK == 0:
            between = _clocks()
            for number in range(BLOCK):
                ddp_step(ddp, their_optimizer, data, loss_of, number * world + job.rank, shard)
            ended = _clocks()
            if step.number > BLOCK:  # the first block of each warms up
                for place, sides in enumerate(times.values()):
                    sides["holdfast"].append((between - started)[place] / BLOCK)
                    sides["ddp"].append((ended - between)[place] / BLOCK)
    if job.rank == 0:
        (folder / "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def _clocks() -> np.ndarray:
    """Return the wall clock after a barrier, and the processor time of all ranks, in seconds."""
    import plain_torch
    import torch

    used = torch.tensor([time.process_time()], dtype=torch.float64)
    plain_torch.all_reduce(used)
    return np.array([time.perf_counter(), used.item()])


def ddp_step(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    data: Bytes,
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor],
    first: int,
    shard: int,
) -> None:
    """Run one step as DDP users do: accumulate without sync, then reduce, clip, and step."""
    import plain_torch
    import torch

    from holdfast.runtime.tensors import collate

    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for number in range(shard):
        batch = collate([data[(first * shard + number) * 4 + place] for place in range(4)])
        if number < shard - 1:
            with ddp.no_sync():
                loss = loss_of(ddp, batch) / shard
                torch.autograd.backward(loss)
        else:
            loss = loss_of(ddp, batch) / shard
            torch.autograd.backward(loss)
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    # Both report the global mean loss every step.
    plain_torch.all_reduce(total)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        args = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
        worker(Path(args["--worker"]), int(args["--blocks"]), int(args["--world"]))
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        sys.exit(main())
