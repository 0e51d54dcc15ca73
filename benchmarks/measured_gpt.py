"""The model of `benchmarks/recovery.py` as a training script that records how long each rank computes.

    holdfast run --nodes 4 benchmarks/measured_gpt.py --layers 6 --dim 256 --heads 4 --context 16 --folder FOLDER

Each worker appends to its own file how long it computed in each attempt at a step: from the request for the first
micro-batch to the gradients of the last one, without communication. It records wall time and the thread's processor
time. At the end rank 0 writes all parameters to `parameters.npy` in double precision.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch

import holdfast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
PARAMETERS = "parameters.npy"


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a worker's own micro-batches in one attempt at a step."""

    step: int
    shadow: bool
    micro_batches: int
    #: Unix seconds.
    end: float
    own_s: float
    processor_s: float

    @property
    def each_s(self) -> float:
        """Seconds per micro-batch: interrupted attempts have fewer micro-batches."""
        return self.own_s / self.micro_batches

    @property
    def each_processor_s(self) -> float:
        """Processor seconds per micro-batch."""
        return self.processor_s / self.micro_batches


def main() -> None:
    """Train, as one rank of a job or alone."""
    from dense_gpt import GPT, Bytes, loss_of, read_text

    options = _options()
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    dtype = getattr(torch, options.dtype)
    job = holdfast.init()
    model = GPT(options.layers, options.dim, options.heads, options.context).to(job.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    norm = None if options.no_clipping else 1.0
    if options.compile:
        model.compile()  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    data = Bytes(read_text(None), options.context)
    job.protect(model, optimizer, data, global_batch=32, micro_batch=4, max_grad_norm=norm)
    done = 0
    with _file_of_worker(options.folder).open("ab", buffering=0) as file:
        for step in job.steps(options.steps):
            began, processor, count = time.perf_counter(), time.thread_time(), 0
            for batch in step.micro_batches():
                step.backward(loss_of(model, batch))
                count += 1
            if job.device.type == "cuda":
                torch.cuda.synchronize()  # otherwise only kernel launches would be timed
            own = Attempt(
                step=step.number,
                shadow=step.shadow,
                micro_batches=count,
                end=time.time(),
                own_s=time.perf_counter() - began,
                processor_s=time.thread_time() - processor,
            )
            file.write(msgspec.json.encode(own) + b"\n")
            done = step.number if step.apply() else done
    if job.rank == 0 and done == options.steps:  # a worker that became a standby has no state
        parameters = [parameter.detach().double().flatten() for parameter in model.parameters()]
        np.save(options.folder / PARAMETERS, torch.cat(parameters).cpu().numpy())


def attempts_of(folder: Path, node: str) -> Iterator[Attempt]:
    """Yield the attempts recorded so far by the workers of a node, in order."""
    for path in sorted(folder.glob(f"{node}-*.attempts")):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield msgspec.json.decode(line, type=Attempt)


def find_first_real(attempts: Iterator[Attempt], since: float) -> Attempt | None:
    """Return the first attempt after a moment with micro-batches that are not shadow work, or None."""
    return next((one for one in attempts if one.end > since and one.micro_batches and not one.shadow), None)


def _file_of_worker(folder: Path) -> Path:
    """Return the file of this worker, also for a script run alone."""
    worker = json.loads(os.environ.get("HOLDFAST_WORKER", '{"worker": "alone/0"}'))["worker"]
    return folder / f"{worker.replace('/', '-')}.attempts"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the files")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--no-clipping", action="store_true", help="do not clip the gradient norm")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    main()
