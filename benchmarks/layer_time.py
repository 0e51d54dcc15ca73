"""Compare the time of a MoE layer with plain `grouped_mm` of the same experts, in one process with one thread.

Both sides have the same weights, gate and tokens. The plain side sorts with torch's own sort, indexes, multiplies all
experts at once and sums with `index_add`. The sides alternate, and must agree before they are timed. The benchmark
prints processor milliseconds (median and range) of forward and backward, and the median ratio of the pairs.

    OMP_NUM_THREADS=1 python benchmarks/layer_time.py [--turns 200] [--tokens 2048] [--dim 256] [--experts 8]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from dispatch_gpu import torch_permutation

import holdfast
from holdfast.runtime.tensors import seed_all

WARM_UP = 10
GOAL = 1.1


def make_layers(args: argparse.Namespace) -> dict[str, holdfast.MoE]:
    """Return the timed layers by description."""
    sizes, top_k = (args.dim, args.hidden, args.experts), args.top_k
    groups = args.experts // 2
    gate = holdfast.TopKGate(
        args.experts, top_k, score="sigmoid", scale=2.5, groups=groups, groups_kept=max(groups // 2, 1), bias_rate=1e-3
    )
    return {
        "plain experts, softmax": holdfast.MoE(*sizes, top_k, seed=0),
        "gated experts, softmax": holdfast.MoE(*sizes, top_k, gated=True, seed=0),
        "gated experts, DeepSeek-V3's gate": holdfast.MoE(*sizes, top_k, gated=True, gate=gate, seed=0),
    }


def time_pass(forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor], grad: torch.Tensor) -> float:
    """Return the processor seconds of one forward and backward pass."""
    began = time.process_time()
    torch.autograd.grad(forward(), leaves, grad)
    return time.process_time() - began


def compare(name: str, layer: holdfast.MoE, args: argparse.Namespace) -> float:
    """Time a layer and the plain side alternately; print and return the median ratio."""
    tokens = torch.randn(args.tokens, args.dim, requires_grad=True)
    leaves, grad = [tokens, *layer.parameters()], torch.randn(args.tokens, args.dim)
    ours, plain = lambda: layer(tokens), lambda: torch_permutation(layer, tokens)
    worst = float((ours() - plain()).detach().abs().max() / plain().detach().abs().max())
    if worst > 1e-5:
        raise SystemExit(f"{name}: the sides differ by {worst:.1e}")
    table: list[tuple[float, float]] = []
    for turn in range(args.turns + WARM_UP):
        if turn % 2:
            pair = time_pass(ours, leaves, grad), time_pass(plain, leaves, grad)
        else:
            second = time_pass(plain, leaves, grad)
            pair = time_pass(ours, leaves, grad), second
        table.append(pair)
    mine, theirs = ([pair[side] * 1e3 for pair in table[WARM_UP:]] for side in range(2))
    ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    print(f"{name:36} {_format_times(mine)}   {_format_times(theirs)}   {ratio:.3f}x (asked <= {GOAL})", flush=True)
    return ratio


def _format_times(times: list[float]) -> str:
    return f"{statistics.median(times):7.2f} ({min(times):.2f}..{max(times):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    args = parser.parse_args()
    seed_all(0)
    print(f"{args.tokens} tokens, {args.dim} wide, {args.experts} experts of {args.hidden}, top {args.top_k}, float32")
    print(f"{'ms of processor, median (range)':36} {'holdfast':26} plain grouped_mm")
    for name, layer in make_layers(args).items():
        compare(name, layer, args)


if __name__ == "__main__":
    main()
