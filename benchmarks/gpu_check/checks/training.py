"""Train with one worker; losses must equal the CPU's and plain torch's, and the step times of both are measured."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from dense_gpt import GPT, Bytes, loss_of, read_text

from benchmarks.gpu_check.checks.jobs import (
    finish,
    largest_difference,
    losses_of,
    make_job,
    median_step_s,
)
from benchmarks.gpu_check.options import Device, Figures, Options, require
from holdfast.runtime.data.sampling import SampleOrder
from holdfast.runtime.tensors import collate, seed_all

#: The largest relative difference to the losses on a CPU.
CPU_BOUNDS = {"float32": 1e-3, "bfloat16": 3e-2}
#: The same for plain torch on the same device, which runs the same kernels.
PLAIN_BOUNDS = {"float32": 1e-5, "bfloat16": 3e-3}
DEVICES: tuple[Device, ...] = ("cuda", "cpu")
#: The default of `dense_gpt.py`, as are the learning rate and the batch sizes below.
SEED = 0


@dataclass(frozen=True, slots=True)
class _Training:
    """The sizes of the model and the number of steps."""

    layers: int
    dim: int
    heads: int
    context: int
    steps: int

    def arguments(self, dtype: str) -> list[str]:
        """Return the arguments of `dense_gpt.py`."""
        names = ("layers", "dim", "heads", "context", "steps")
        return [*(part for name in names for part in (f"--{name}", str(getattr(self, name)))), "--dtype", dtype]


SMALL = _Training(layers=2, dim=64, heads=4, context=32, steps=8)
COMPARED = _Training(layers=4, dim=128, heads=4, context=64, steps=20)
TIMED = _Training(layers=12, dim=1024, heads=16, context=512, steps=40)


def run(options: Options, figures: Figures) -> None:
    """Compare losses with the CPU, then losses and step times with plain torch."""
    if options.device == "cuda":
        _compare_with_cpu(options, figures)
        training, dtype = TIMED, "bfloat16"
    else:
        training, dtype = SMALL, "float32"  # half precision is slow on a CPU
    with make_job(options, "timed", training.arguments(dtype), command=("--nodes", "1")) as job:
        finish(job, 100.0)
    plain_losses, plain_s = _train_without_holdfast(training, dtype, options.device)
    step_s, difference = median_step_s(job), largest_difference(losses_of(job), plain_losses)
    figures["step"] = {"holdfast_s": step_s, "plain_torch_s": plain_s, "ratio": step_s / plain_s}
    figures["difference_to_plain_torch"] = difference
    _require_at_most(difference, PLAIN_BOUNDS[dtype], f"{dtype}: losses differ from plain torch's")


def _compare_with_cpu(options: Options, figures: Figures) -> None:
    with ExitStack() as stack:
        jobs = {
            (dtype, device): stack.enter_context(
                make_job(
                    options, f"{dtype}-{device}", COMPARED.arguments(dtype), command=("--nodes", "1"), device=device
                )
            )
            for dtype in CPU_BOUNDS
            for device in DEVICES
        }
        for job in jobs.values():
            finish(job, 100.0)
    for dtype in CPU_BOUNDS:
        losses = losses_of(jobs[dtype, "cuda"])
        difference = largest_difference(losses, losses_of(jobs[dtype, "cpu"]))
        figures[dtype] = {"losses": [losses[1], losses[COMPARED.steps]], "difference_to_cpu": difference}
        _require_at_most(difference, CPU_BOUNDS[dtype], f"{dtype}: losses differ from the CPU's")


def _require_at_most(difference: float, bound: float, problem: str) -> None:
    require(difference <= bound, f"{problem} by {difference:.2g}, allowed {bound:g}")


def _train_without_holdfast(training: _Training, dtype: str, device: str) -> tuple[dict[int, float], float]:
    """Run the same training in plain torch; return the loss of each step and the median time of a step."""
    seed_all(SEED)
    model = GPT(training.layers, training.dim, training.heads, training.context).to(device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    data = Bytes(read_text(None), training.context)
    order = SampleOrder(seed=SEED, length=len(data), global_batch=32, micro_batch=4)
    losses: dict[int, float] = {}
    times: list[float] = []
    for step in range(1, training.steps + 1):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for number in range(order.micro_batches):
            inputs, targets = collate([data[index] for index in order.indices(step, number)])
            loss = loss_of(model, (inputs.to(device), targets.to(device)), dtype) / order.micro_batches
            torch.autograd.backward(loss)
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses[step] = float(total)
        times.append(time.perf_counter() - began)
    return losses, statistics.median(times[len(times) // 4 :])
