"""Check that Triton's dispatch kernels agree with torch's, and measure their bandwidth and one MoE layer."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks import dispatch_gpu
from benchmarks.gpu_check.options import Figures, NotPossibleError, Options, require
from holdfast.runtime.moe.kernels.interface import Movement
from holdfast.runtime.tensors import seed_all

#: Sums are in float32 on both sides, but may be rounded differently.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def run(options: Options, figures: Figures) -> None:
    """Compare results, then measure."""
    cpu = options.device == "cpu"
    args = argparse.Namespace(
        device=torch.device(options.device),
        tokens=64 if cpu else 8192,
        dim=32 if cpu else 4096,
        hidden=64 if cpu else 8192,
        experts=8,
        top_k=2,
        repeats=2 if cpu else 10 if options.quick else 30,
    )
    makers = dispatch_gpu.available_kernels(args.device)
    figures["kernels"] = [kernels.name for kernels in makers]
    if len(makers) < 2:
        raise NotPossibleError("Triton is not installed: there is nothing to compare torch's kernels with")
    for dtype, bound in BOUND.items():
        args.dtype = dtype
        worst = _compare(args)
        figures[f"{dtype}".removeprefix("torch.")] = {"largest_difference": worst}
        require(worst <= bound, f"{dtype}: results of the kernels differ by {worst:.2g}, allowed {bound:g}")
    args.dtype = torch.float32 if cpu else torch.bfloat16
    figures["measured"] = [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in entry.items()}
        for entry in dispatch_gpu.bench_kernels(args)
    ]
    figures["plan"] = dispatch_gpu.bench_plan(args)
    figures["layer"] = dispatch_gpu.bench_layer(args)


def _compare(args: argparse.Namespace) -> float:
    """Return the largest difference of all kernels' results, relative to the largest value."""
    results: list[dict[str, Any]] = []
    for kernels in dispatch_gpu.available_kernels(args.device):
        seed_all(0)
        runs = dispatch_gpu.kernel_runs(kernels, args)
        results.append({name: action() for name, (action, _) in runs.items()})
        results[-1]["plan"] = _tensors_of(kernels.plan(dispatch_gpu.make_plan_inputs(args)))
    worst = 0.0
    for other in results[1:]:
        for name, wanted in results[0].items():
            for one, two in zip(_listed(other[name]), _listed(wanted), strict=True):
                worst = max(worst, difference(name, one, two))
    return worst


def difference(name: str, result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value.

    Raises:
        CheckFailedError: they differ in shape, or have values that are not finite.
    """
    require(result.shape == wanted.shape, f"{name}: shape {tuple(result.shape)}, wanted {tuple(wanted.shape)}")
    for values in (result, wanted):  # max() passes over NaN
        require(bool(values.isfinite().all()), f"{name}: the result has values that are not finite")
    largest = max(float(wanted.double().abs().max()), 1e-30)
    return float((result.double() - wanted.double()).abs().max()) / largest


def _tensors_of(movement: Movement) -> list[torch.Tensor]:
    return [
        movement.send_order,
        movement.send_inverse,
        movement.receive_order,
        movement.receive_inverse,
        movement.row_ends,
        torch.tensor([*movement.send, *movement.receive]),
    ]


def _listed(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)
