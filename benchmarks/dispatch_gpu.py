"""Measure token dispatch on a GPU: bandwidth of each kernel relative to a device copy, and one MoE layer.

1. Each kernel (Triton's, and torch's own indexing): the bytes that it must at least read and write per second, as a
   share of the rate of a device copy of the same tokens (8192 x 4096 in bfloat16), with cold caches.
2. The plan of a dispatch among 8 ranks: from gathered counts to the orders of the rows.
3. One MoE layer, forward and backward, all experts on one GPU: holdfast with Triton's kernels and with torch's, a plain
   loop over the experts, and `grouped_mm` with torch's own permutation. All four must agree before they are timed.

Results go to `benchmarks/results/dispatch-<gpu>.json`. Without a GPU the benchmark prints that and exits with 2.
`--device cpu` runs everything on small sizes (with `TRITON_INTERPRET=1` in Triton's interpreter) to test the code; its
times mean nothing.

    python benchmarks/dispatch_gpu.py [--tokens 8192] [--dim 4096] [--repeats 50] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from holdfast.planning import Interval
from holdfast.planning.arrays import IntArray
from holdfast.runtime.groups.communicator import LocalCommunicator
from holdfast.runtime.moe.experts.stack import StackedExperts
from holdfast.runtime.moe.hosts import place_everywhere
from holdfast.runtime.moe.kernels.interface import DispatchInputs, TokenKernels
from holdfast.runtime.moe.kernels.kernel_choice import has_triton
from holdfast.runtime.moe.kernels.torch_kernels import TorchKernels
from holdfast.runtime.moe.layer.moe_layer import MoE
from holdfast.runtime.moe.layer.rounds import StepState
from holdfast.runtime.moe.layer.token_exchange import Channel
from holdfast.runtime.tensors import from_array, seed_all

WARM_UP = 5
RANKS = 8
_BALLAST = 1 << 30


def available_kernels(device: torch.device) -> list[TokenKernels]:
    """Return the kernels that can run here."""
    found: list[TokenKernels] = [TorchKernels()]
    if has_triton() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"):
        from holdfast.runtime.moe.kernels.triton_kernels import TritonKernels

        found.append(TritonKernels())
    return found


def time_runs(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Return the seconds of each of *repeats* runs with cold caches, by the device's clock if it has one."""
    for _ in range(WARM_UP):
        run()
    if device.type != "cuda":
        times: list[float] = []
        for _ in range(repeats):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return times
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    ballast = torch.empty(_BALLAST, dtype=torch.uint8, device=device)
    for begin, end in marks:
        # Empties the cache, and keeps the device busy until the host has launched the timed kernels.
        ballast.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


# ---- the kernels ----


def kernel_runs(kernels: TokenKernels, args: argparse.Namespace) -> dict[str, tuple[Callable[[], object], int]]:
    """Return a function that runs each kernel, and the bytes that the kernel must move."""
    device, dtype, top_k = args.device, args.dtype, args.top_k
    few = args.tokens // top_k
    order = torch.randperm(few * top_k, device=device)
    inverse = torch.argsort(order)
    rows = torch.randn(few * top_k, args.dim, device=device, dtype=dtype)
    tokens = torch.randn(few, args.dim, device=device, dtype=dtype)
    weights = torch.rand(few, top_k, device=device)
    all_tokens, all_rows = tokens.nbytes, rows.nbytes
    return {
        "reorder": (lambda: kernels.gather(rows, order), 2 * all_rows),
        f"spread, top {top_k}": (lambda: kernels.gather(tokens, order, top_k), all_rows + all_tokens),
        "spread, backward": (lambda: kernels.gather_sum(rows, inverse, top_k), all_rows + all_tokens),
        f"combine, top {top_k}": (lambda: kernels.combine(rows, weights, inverse, dtype), all_rows + all_tokens),
        "combine, backward": (
            lambda: kernels.combine_backward(tokens, rows, weights, order, inverse),
            2 * all_rows + all_tokens,
        ),
    }


def bench_kernels(args: argparse.Namespace) -> list[dict[str, Any]]:
    source = torch.randn(args.tokens, args.dim, device=args.device, dtype=args.dtype)
    target = torch.empty_like(source)
    copy = time_runs(lambda: target.copy_(source), args.device, args.repeats)
    bandwidth = 2 * source.nbytes / statistics.median(copy)
    print(
        f"{args.tokens} x {args.dim} {args.dtype}; a device copy of them: {bandwidth / 1e9:.0f} GB/s (read + written)"
    )
    results: list[dict[str, Any]] = [{"name": "device copy", "gb_per_s": bandwidth / 1e9}]
    for kernels in available_kernels(args.device):
        for name, (run, size) in kernel_runs(kernels, args).items():
            times = time_runs(run, args.device, args.repeats)
            rate = size / statistics.median(times)
            goal = "  asked >= 0.7" if kernels.name == "triton" else ""
            spread = f"({min(times) * 1e6:.0f}..{max(times) * 1e6:.0f} us)"
            print(f"  {kernels.name:7} {name:18} {rate / 1e9:8.0f} GB/s  {rate / bandwidth:.2f}x of it {spread}{goal}")
            results.append({"name": name, "kernels": kernels.name, "gb_per_s": rate / 1e9, "of_copy": rate / bandwidth})
    return results


# ---- the plan ----


def make_plan_inputs(args: argparse.Namespace) -> DispatchInputs:
    """Return the input of a dispatch plan; it depends only on the arguments."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(args.experts, 0.5))
    assigned: list[IntArray] = [rng.choice(args.experts, args.tokens, p=shares) for _ in range(RANKS)]
    tokens = np.stack([np.bincount(mine, minlength=args.experts) for mine in assigned], axis=1)
    replicas = rng.integers(0, 2, (args.experts, RANKS))
    replicas[np.arange(args.experts), rng.integers(0, RANKS, args.experts)] += 1
    return DispatchInputs(
        assigned_A=from_array(assigned[0]).to(args.device),
        tokens_EN=from_array(tokens).to(args.device),
        replicas=replicas,
        rank=0,
        row_experts=np.flatnonzero(replicas[:, 0]).tolist(),
        scheme=Interval(),
    )


def bench_plan(args: argparse.Namespace) -> list[dict[str, Any]]:
    question = make_plan_inputs(args)
    print(f"The plan of {args.tokens} assignments a rank, {args.experts} experts, {RANKS} ranks:")
    results: list[dict[str, Any]] = []
    for kernels in available_kernels(args.device):
        times = time_runs(lambda kernels=kernels: kernels.plan(question), args.device, args.repeats)
        print(f"  {kernels.name:7} median {statistics.median(times) * 1e3:.3f} ms ({min(times) * 1e3:.3f} at best)")
        results.append({"kernels": kernels.name, "median_ms": statistics.median(times) * 1e3})
    return results


# ---- the layer ----


def route(layer: MoE, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    choice = layer.gate(layer.router(tokens))
    return choice.experts, choice.weights


def experts_of(layer: MoE) -> StackedExperts:
    assert isinstance(layer.experts, StackedExperts)
    return layer.experts


def plain_loop(layer: MoE, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the layer with a plain loop over the experts."""
    (experts, weights), stack = route(layer, tokens), experts_of(layer)
    out = torch.zeros_like(tokens, dtype=weights.dtype)
    for expert in range(stack.experts):
        token, place = torch.where(experts == expert)
        hidden = stack.between(tokens[token] @ stack.w1[expert])
        out = out.index_add(0, token, (hidden @ stack.w2[expert]) * weights[token, place, None])
    return out.to(tokens.dtype)


def torch_permutation(layer: MoE, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the layer with `grouped_mm` between torch's own sort, index and index_add."""
    (experts, weights), stack = route(layer, tokens), experts_of(layer)
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=stack.experts).cumsum(0).to(torch.int32)
    hidden = stack.between(F.grouped_mm(tokens[order // layer.top_k], stack.w1, offs=ends))
    done = F.grouped_mm(hidden, stack.w2, offs=ends) * weights.reshape(-1)[order, None]
    out = torch.zeros_like(tokens, dtype=weights.dtype)
    return out.index_add(0, order // layer.top_k, done).to(tokens.dtype)


def bench_layer(args: argparse.Namespace) -> list[dict[str, Any]]:
    layer = MoE(args.dim, args.hidden, args.experts, args.top_k, seed=0).to(args.device, args.dtype)
    tokens = torch.randn(args.tokens, args.dim, device=args.device, dtype=args.dtype, requires_grad=True)
    leaves = [tokens, *layer.parameters()]

    def ours(kernels: TokenKernels) -> Callable[[], torch.Tensor]:
        def forward() -> torch.Tensor:
            channel = Channel(comm=LocalCommunicator(), state=StepState())
            layer.bind(channel, place_everywhere([args.experts], 1)[0], kernels=kernels)
            return layer(tokens)

        return forward

    sides = {f"ours, {kernels.name}": ours(kernels) for kernels in available_kernels(args.device)}
    sides["plain loop"] = lambda: plain_loop(layer, tokens)
    sides["grouped_mm, torch's permutation"] = lambda: torch_permutation(layer, tokens)
    wanted = plain_loop(layer, tokens).detach()
    grad = torch.randn_like(wanted)
    print(f"One MoE layer, {args.experts} experts of {args.dim} x {args.hidden}, top {args.top_k}, forward + backward:")
    results: list[dict[str, Any]] = []
    for name, forward in sides.items():
        worst = float((forward().detach() - wanted).abs().max() / wanted.abs().max())
        if not worst <= 0.05:  # also for NaN
            raise SystemExit(f"{name} computes something else: {worst:.3f} off")
        times = time_runs(
            lambda forward=forward: torch.autograd.grad(forward(), leaves, grad), args.device, args.repeats
        )
        print(f"  {name:32} median {statistics.median(times) * 1e3:9.3f} ms ({min(times) * 1e3:.3f} at best)")
        results.append({"name": name, "median_ms": statistics.median(times) * 1e3, "min_ms": min(times) * 1e3})
    return results


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("torch finds no usable GPU: nothing was measured. Use --device cpu to test the code.")
        sys.exit(2)
    args.device, args.dtype = torch.device(args.device), getattr(torch, args.dtype)
    return args


def main() -> None:
    args = parse_arguments()
    seed_all(0)
    on_gpu = args.device.type == "cuda"
    machine = torch.cuda.get_device_name(args.device) if on_gpu else f"{platform.machine()} cpu"
    print(f"{machine}, torch {torch.__version__}")
    results = {
        "machine": machine,
        "torch": str(torch.__version__),
        "sizes": {name: getattr(args, name) for name in ("tokens", "dim", "hidden", "experts", "top_k")},
        "dtype": str(args.dtype),
        "kernels": bench_kernels(args),
        "plan": bench_plan(args),
        "layer": bench_layer(args),
    }
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"dispatch-{re.sub('[^a-z0-9]+', '-', machine.lower())}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
