"""One worker trains on the device: losses equal the CPU's, and a step takes as long as without holdfast."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from dense_gpt import GPT, Bytes, loss_of, read_text

from benchmarks.gpu_check.checks.jobs import (
    CheckJob,
    finish,
    largest_difference,
    losses_of,
    make_job,
    median_step_s,
)
from benchmarks.gpu_check.options import Device, Figures, Options, require
from holdfast.runtime.tensors import collate, seed_all

#: The largest relative difference to the losses on a CPU.
BOUNDS = {"float32": 1e-3, "bfloat16": 3e-2}
DEVICES: tuple[Device, ...] = ("cuda", "cpu")


@dataclass(frozen=True, slots=True)
class _Training:
    """What is trained: the sizes of the model, and for how long."""

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
    """Compare losses, then step times."""
    if options.device == "cpu":  # nothing to compare with, and half precision is slow
        with make_job(options, "timed", SMALL.arguments("float32"), command=("--nodes", "1")) as job:
            finish(job, 100.0)
        _compare_step_times(figures, job, SMALL, "float32", options.device)
        return
    with ExitStack() as stack:
        jobs = {
            (dtype, device): stack.enter_context(
                make_job(
                    options, f"{dtype}-{device}", COMPARED.arguments(dtype), command=("--nodes", "1"), device=device
                )
            )
            for dtype in BOUNDS
            for device in DEVICES
        }
        for job in jobs.values():
            finish(job, 100.0)
    for dtype, bound in BOUNDS.items():
        losses = losses_of(jobs[dtype, "cuda"])
        difference = largest_difference(losses, losses_of(jobs[dtype, "cpu"]))
        figures[dtype] = {"losses": [losses[1], losses[COMPARED.steps]], "difference_to_cpu": difference}
        require(difference <= bound, f"{dtype}: losses differ from the CPU's by {difference:.2g}, allowed {bound:g}")
    with make_job(options, "timed", TIMED.arguments("bfloat16"), command=("--nodes", "1")) as job:
        finish(job, 100.0)
    _compare_step_times(figures, job, TIMED, "bfloat16", options.device)


def _compare_step_times(figures: Figures, job: CheckJob, training: _Training, dtype: str, device: str) -> None:
    plain_s = _plain_step_s(training, dtype, device)
    held_s = median_step_s(job)
    figures["step"] = {"holdfast_s": held_s, "plain_torch_s": plain_s, "ratio": held_s / plain_s}


def _plain_step_s(training: _Training, dtype: str, device: str) -> float:
    """Return the median time of a step of the same training without holdfast."""
    seed_all(0)
    model = GPT(training.layers, training.dim, training.heads, training.context).to(device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    data = Bytes(read_text(None), training.context)
    times: list[float] = []
    for step in range(training.steps):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for number in range(8):
            first = (step * 8 + number) * 4
            inputs, targets = collate([data[first + place] for place in range(4)])
            loss = loss_of(model, (inputs.to(device), targets.to(device)), dtype) / 8
            torch.autograd.backward(loss)
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total.item()
        times.append(time.perf_counter() - began)
    return statistics.median(times[len(times) // 4 :])
